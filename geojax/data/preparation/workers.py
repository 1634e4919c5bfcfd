"""Worker processes that tokenize the parts of a source.

The parts are the same for any number of workers, and so are the folders. No process holds more
than a batch of tokens.
"""

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple

from geojax.data.files.formats import holds_tokens, record_file_of
from geojax.data.files.opening import Advance
from geojax.data.preparation.file_tokens import FilePart, FileReader, content_of
from geojax.data.preparation.part_tokens import AppendParts, Part, PartProgress, tokenize_part
from geojax.data.settings import PrepareSettings, PrepareSource
from geojax.data.storage import TOKENIZER, VALIDATION, SplitName
from geojax.data.templates.chat import ChatTemplate
from geojax.data.tokenizer import Tokenizer
from geojax.errors import RunError

PART_BYTES = 1 << 26
"""About the bytes of files that a worker tokenizes in one go."""
_PART_FILES = 4096
"""Most files of a part."""
_PARTS_AHEAD = 2
"""Parts for each worker that are read while an earlier one is waited for."""
_POLL_SECONDS = 0.2
_REPORT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class WorkerSetup:
    """All that a worker needs to know; it is sent to another process."""

    folder: Path
    """Folder that is being prepared; it holds the tokenizer."""
    source: PrepareSource
    settings: PrepareSettings
    beginning: str
    end: str
    """Names of the tokenizer's special tokens."""
    dtype: str
    """Dtype of the shards."""
    are_conversations: bool
    """True if the files hold conversations."""

    def reader(self) -> FileReader:
        """Make the reader of the source's files; the tokenizer of conversations has a template.

        Raises:
            UserError: there is no template, or it cannot be read.
        """
        tokenizer = Tokenizer.load(self.folder / TOKENIZER, beginning=self.beginning, end=self.end)
        template = None
        if self.are_conversations:
            assert self.settings.tokenizer is not None, "conversations are refused without one"
            template = ChatTemplate.load(self.settings.tokenizer, self.settings.chat_template)
        return FileReader(self.source, tokenizer, template)


def parts_of(
    source: PrepareSource, files: Iterable[Path], validation_files: Iterable[Path]
) -> Iterator[Part]:
    """Divide a source's files into parts of about `PART_BYTES`.

    Small files are taken together, and large ones are divided where their format allows it.
    """
    part: list[FilePart] = []
    total = 0
    for piece, size in _pieces(source, files, validation_files):
        if part and (total + size > PART_BYTES or len(part) == _PART_FILES):
            yield part
            part, total = [], 0
        part.append(piece)
        total += size
    if part:
        yield part


def _pieces(
    source: PrepareSource, files: Iterable[Path], validation_files: Iterable[Path]
) -> Iterator[tuple[FilePart, int]]:
    splits: list[tuple[Path, SplitName | None]] = [(path, None) for path in files]
    splits += [(path, VALIDATION) for path in validation_files]
    for path, split in splits:
        size = content_of(path, source).stat().st_size
        divided = None
        if size > PART_BYTES and not holds_tokens(path, source.format):
            divided = record_file_of(path, source.format)
        if divided is None:
            yield FilePart(path, None, split), size
        else:
            for span in divided.spans(path, PART_BYTES):
                yield FilePart(path, span, split), PART_BYTES if span else size


def worker_count(given: int | None, total_bytes: int) -> int:
    """Choose the number of workers: what is given, or one for each core and part of the bytes."""
    if given is not None:
        return given
    return max(1, min(len(os.sched_getaffinity(0)), total_bytes // PART_BYTES))


def tokenize_parts(
    setup: WorkerSetup,
    parts: Sequence[Part],
    count: int,
    append: AppendParts,
    advance: Advance,
) -> None:
    """Tokenize all parts, and append them in their order.

    Args:
        setup: what each worker needs.
        parts: the parts.
        count: number of workers; one is this process.
        append: appends a part that is whole.
        advance: takes the bytes that all workers have read.

    Raises:
        UserError: a file cannot be read, or holds something else; of several the first one.
        RunError: a worker was killed.
    """
    if count == 1:
        reader = setup.reader()
        for number, part in enumerate(parts):
            made = tokenize_part(setup.folder, number, part, reader, setup.dtype, advance)
            append(number, made)
        return
    context = multiprocessing.get_context("spawn")  # threads of the tokenizer do not survive a fork
    shared = _Shared(context.Value("q", 0), context.Value("b", 0))
    with concurrent.futures.ProcessPoolExecutor(
        count, mp_context=context, initializer=_start, initargs=(setup, shared)
    ) as pool:
        waiting: collections.deque[tuple[int, concurrent.futures.Future[PartProgress]]]
        waiting = collections.deque()
        try:
            for number, part in enumerate(parts):
                waiting.append((number, pool.submit(_tokenize, number, part)))
                if len(waiting) > count * _PARTS_AHEAD:
                    _append_first(waiting, append, shared, advance)
            while waiting:
                _append_first(waiting, append, shared, advance)
        except BrokenProcessPool:
            raise RunError(
                f"{setup.folder}: a worker process was killed, perhaps for want of memory; the "
                "same command goes on, and fewer --workers need less"
            ) from None
        finally:
            shared.stopped.value = 1
            pool.shutdown(cancel_futures=True)


class _Shared(NamedTuple):
    """Numbers that all processes see."""

    bytes_read: "Synchronized[int]"
    stopped: "Synchronized[int]"


class _StoppedError(Exception):
    """Ends a worker's part that nobody waits for any more."""


def _append_first(
    waiting: "collections.deque[tuple[int, concurrent.futures.Future[PartProgress]]]",
    append: AppendParts,
    shared: _Shared,
    advance: Advance,
) -> None:
    """Wait for the first part, and append it."""
    number, future = waiting.popleft()
    while True:
        done, _ = concurrent.futures.wait([future], timeout=_POLL_SECONDS)
        with shared.bytes_read.get_lock():
            advance(shared.bytes_read.value)
            shared.bytes_read.value = 0
        if done:
            break
    append(number, future.result())


class _Worker:
    """A worker process between its parts."""

    def __init__(self, setup: WorkerSetup, shared: _Shared) -> None:
        self._setup, self._shared, self._reader = setup, shared, setup.reader()
        self._unreported = 0

    def tokenize(self, number: int, part: Part) -> PartProgress:
        """Write the tokens of a part."""
        folder, dtype = self._setup.folder, self._setup.dtype
        made = tokenize_part(folder, number, part, self._reader, dtype, self._advance)
        self._report()
        return made

    def _advance(self, bytes_read: int) -> None:
        self._unreported += bytes_read
        if self._unreported >= _REPORT_BYTES:
            self._report()

    def _report(self) -> None:
        if self._shared.stopped.value:
            raise _StoppedError
        with self._shared.bytes_read.get_lock():
            self._shared.bytes_read.value += self._unreported
        self._unreported = 0


_worker: _Worker | None = None


def _start(setup: WorkerSetup, shared: _Shared) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it tells it to stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it has one core
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = _Worker(setup, shared)


def _tokenize(number: int, part: Part) -> PartProgress:
    assert _worker is not None, "a worker is started before its first part"
    return _worker.tokenize(number, part)


def _end_with_parent() -> None:
    """End this process with the one that started it, which may be killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
