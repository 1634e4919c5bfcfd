"""Records of who takes part: what is refused, and that of several writers one wins."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from geojax.errors import UserError
from geojax.membership.file_store import FileRecordStore
from geojax.membership.record import MembershipRecord, UnreachableStoreError
from geojax.membership.record_file import decode_record, encode_record
from geojax.membership.s3_store import S3RecordStore

FIRST = MembershipRecord(1, (0, 1, 2), 0)
EAST = MembershipRecord(2, (0, 1), 0)
WEST = MembershipRecord(2, (1, 2), 1)
WRITERS = 8


class ObjectStore(ThreadingHTTPServer):
    """One object over HTTP on the loopback, with the conditional requests of S3."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), ObjectHandler)
        self.content, self.lock = None, threading.Lock()
        self.status = None
        """Status of every answer; None: that of the request."""
        self.loses_answers = 0
        """PUTs that are done and then answered by an error that the client tries again."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class ObjectHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status, code):
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.answer(status, body, Content_Type="application/xml")

    def tag(self):
        content = self.server.content
        return None if content is None else f'"{hashlib.md5(content).hexdigest()}"'

    def do_GET(self):
        if self.server.status is not None:
            self.refuse(self.server.status, "AccessDenied")
        elif self.server.content is None:
            self.refuse(404, "NoSuchKey")
        else:
            self.answer(200, self.server.content, ETag=self.tag())

    def do_PUT(self):
        body = self.body()
        with self.server.lock:
            tag, match = self.tag(), self.headers["If-Match"]
            if (match is not None and match != tag) or (
                self.headers["If-None-Match"] == "*" and tag is not None
            ):
                self.refuse(412, "PreconditionFailed")
                return
            self.server.content = body
            if self.server.loses_answers:
                self.server.loses_answers -= 1
                self.refuse(503, "SlowDown")
            else:
                self.answer(200, ETag=self.tag())

    def body(self):
        if self.headers["Transfer-Encoding"] is None and "aws-chunked" not in (
            self.headers["Content-Encoding"] or ""
        ):
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)


@pytest.fixture
def objects(monkeypatch):
    pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ObjectStore()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def s3_store(objects, run="mine", **arguments):
    return S3RecordStore("s3://runs/record.json", run, endpoint_url=objects.url, **arguments)


@pytest.fixture(params=["file", "s3"])
def store(request, tmp_path):
    if request.param == "file":
        return FileRecordStore(tmp_path / "record.json", "mine")
    return s3_store(request.getfixturevalue("objects"))


def test_a_record_is_written_once_and_then_swapped(store):
    assert store.read() is None
    assert store.create(FIRST) == FIRST
    assert store.create(EAST) == FIRST
    assert store.swap(FIRST, EAST) == EAST
    assert store.read() == EAST


def test_a_swap_of_another_record_than_the_one_that_is_there_writes_nothing(store):
    store.create(FIRST)
    assert store.swap(FIRST, EAST) == EAST
    assert store.swap(FIRST, WEST) == EAST
    assert store.read() == EAST


def test_of_writers_that_swap_one_record_at_once_one_wins(store):
    store.create(FIRST)
    ends, start = [], threading.Barrier(WRITERS)

    def write(number):
        start.wait()
        ends.append(store.swap(FIRST, MembershipRecord(2, (number,), number)))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [store.read()] * WRITERS


WRITER = """
import sys
from pathlib import Path
from geojax.membership.file_store import FileRecordStore
from geojax.membership.record import MembershipRecord
store, site, wins = FileRecordStore(Path(sys.argv[1]), "mine"), int(sys.argv[2]), 0
while (record := store.read()).membership_id < 100:
    new = MembershipRecord(record.membership_id + 1, (site,), site)
    wins += store.swap(record, new) == new
print(wins)
"""


def test_two_processes_win_each_swap_once(tmp_path):
    path = tmp_path / "record.json"
    FileRecordStore(path, "mine").create(FIRST)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(site)], stdout=subprocess.PIPE)
        for site in range(2)
    ]
    wins = [int(writer.communicate(timeout=100)[0]) for writer in writers]
    assert sum(wins) == 99
    assert {file.name for file in tmp_path.iterdir()} == {"record.json", "record.json.lock"}


def test_a_record_that_is_gone_is_not_written_again(store, request, tmp_path):
    with pytest.raises(UserError, match="is gone; end the run at all sites"):
        store.swap(FIRST, EAST)
    assert store.read() is None


def test_another_run_has_another_record(store, request, tmp_path):
    store.create(FIRST)
    if isinstance(store, FileRecordStore):
        other = FileRecordStore(store.path, "theirs")
    else:
        other = s3_store(request.getfixturevalue("objects"), run="theirs")
    for request_of in (other.read, lambda: other.create(EAST), lambda: other.swap(FIRST, EAST)):
        with pytest.raises(UserError, match="run is 'mine'; it must be 'theirs', or give this run"):
            request_of()
    assert store.read() == FIRST


def test_a_put_that_the_client_repeats_after_a_lost_answer_wins(objects):
    store = s3_store(objects)
    store.create(FIRST)
    objects.loses_answers = 1
    assert store.swap(FIRST, EAST) == EAST


def test_an_object_store_that_refuses_or_is_away_is_unreachable(objects):
    store = s3_store(objects, timeout_seconds=20)
    objects.status = 403
    with pytest.raises(UnreachableStoreError, match=r"^s3://runs/.+: could not be read \(.+\)$"):
        store.read()
    objects.shutdown()
    objects.server_close()
    away = s3_store(objects, timeout_seconds=0.5)
    with pytest.raises(UnreachableStoreError, match=r"^s3://runs/.+: could not be read \(.+\)$"):
        away.swap(FIRST, EAST)


def test_without_the_client_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"s3fs is not installed; pip install 'geojax-trainer\[s3"):
        S3RecordStore("s3://runs/record.json", "mine")


@pytest.mark.parametrize("url", ["https://a/b", "s3://bucket", "s3:///key", "s3://b"])
def test_a_url_of_something_else_is_refused(url):
    with pytest.raises(UserError, match="s3://bucket/key would be one"):
        S3RecordStore(url, "mine")


WHOLE = encode_record(FIRST, "mine")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (WHOLE[: len(WHOLE) // 2], "not whole"),
        (b"", "not whole"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b" " * 100_000, "over 65,536 bytes"),
        (WHOLE.replace(b'"holder": 0', b'"holder": 7'), "one of its members"),
        (WHOLE.replace(b"[0, 1, 2]", b"[0, 0, 2]"), "in ascending order"),
        (WHOLE.replace(b"[0, 1, 2]", b"[0, true]"), "in ascending order"),
        (WHOLE.replace(b"membership-1", b"membership-9"), "format"),
        (WHOLE.replace(b'"membership_id": 1', b'"membership_id": 0'), "from 1 on"),
    ],
)
def test_a_torn_or_foreign_record_is_refused_with_its_place(tmp_path, content, problem):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    store = FileRecordStore(path, "mine")
    for request_of in (store.read, lambda: store.create(FIRST), lambda: store.swap(FIRST, EAST)):
        with pytest.raises(UserError, match=problem) as refused:
            request_of()
        assert str(refused.value).startswith(f"{path}: ")
    assert path.read_bytes() == content


def test_a_record_survives_its_bytes():
    assert decode_record(WHOLE, "mine", "here") == FIRST


def test_a_full_disk_leaves_the_record_and_is_unreachable(tmp_path, monkeypatch):
    store = FileRecordStore(tmp_path / "record.json", "mine")
    store.create(FIRST)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UnreachableStoreError, match=r"\(No space left on device\)$"):
            store.swap(FIRST, EAST)
    assert store.read() == FIRST
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_is_not_there_is_unreachable(tmp_path):
    store = FileRecordStore(tmp_path / "absent" / "record.json", "mine")
    for request_of in (store.read, lambda: store.create(FIRST), lambda: store.swap(FIRST, EAST)):
        with pytest.raises(UnreachableStoreError, match="absent"):
            request_of()


def test_a_folder_in_place_of_the_record_is_refused(tmp_path):
    path = tmp_path / "record.json"
    path.mkdir()
    with pytest.raises(UserError, match=r"no regular file; move it away"):
        FileRecordStore(path, "mine").read()
