"""A preparation that is killed at any moment goes on, to the same bytes."""

import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import killed_preparation

import geojax

DRAWN = 10


def run(output, count, event, tokenizer, files):
    command = [sys.executable, killed_preparation.__file__]
    command += [str(each) for each in (output, count, event, tokenizer, *files)]
    package = str(Path(geojax.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": package}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def events_of(output):
    return (output.parent / "events").read_text().splitlines()


def bytes_of(output):
    return {path.name: path.read_bytes() for path in (output / "corpus").iterdir()}


@pytest.fixture(scope="module")
def undisturbed(left, tmp_path_factory):
    """Files of several parts and one that cannot be divided, prepared without a fault."""
    base = tmp_path_factory.mktemp("undisturbed")
    draw, words = random.Random(1), ["alpha ", "beta ", "gamma ", "delta\n"]
    files = []
    for name in ("lines.jsonl", "list.json", "text.txt"):
        texts = ["".join(draw.choices(words, k=draw.randrange(1, 80))) for _ in range(300)]
        records = [json.dumps({"text": text}) for text in texts]
        content = {
            "lines.jsonl": "\n".join(records),
            "list.json": f"[{','.join(records)}]",
            "text.txt": "".join(texts),
        }
        (base / name).write_text(content[name])
        files.append(base / name)
    tokenizer = left.folder / "tokenizer.json"
    output = base / "one" / "out"
    output.parent.mkdir()
    result = run(output, 1, -1, tokenizer, files)
    assert result.returncode == 0, result.stderr
    return files, tokenizer, bytes_of(output), events_of(output)


def kill_and_go_on(undisturbed, output, count, moment):
    """Kill a preparation at the share `moment` of its events; another number of workers goes on."""
    files, tokenizer, expected, _ = undisturbed
    (output.parent / "whole").mkdir(parents=True)
    whole = output.parent / "whole" / "out"
    assert run(whole, count, -1, tokenizer, files).returncode == 0
    events = events_of(whole)
    # The last removals are behind the end: all is there.
    removed = re.compile(r"os\.remove \S*/\.corpus\.preparation ")
    last = next(index for index, line in enumerate(events) if removed.match(line))
    killed = run(output, count, round(moment * last), tokenizer, files)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result = run(output, 5 - count, -1, tokenizer, files)
    assert result.returncode == 0, result.stderr
    assert bytes_of(output) == bytes_of(whole) == expected
    assert [path.name for path in output.iterdir()] == ["corpus"]
    shards = re.findall(r"open \S*/((?:train|validation)-\d{5}\.npy)", "\n".join(events_of(output)))
    again = [name for name, count in collections.Counter(shards).items() if count > 1]
    assert len({name.split("-")[0] for name in again}) == len(again), "one of a split at most"


@pytest.mark.parametrize(("count", "moment"), [(1, 0.4), (4, 0.7), (1, 1.0)])
def test_it_goes_on_with_another_number_of_workers(undisturbed, tmp_path, count, moment):
    kill_and_go_on(undisturbed, tmp_path / "out", count, moment)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("draw", range(DRAWN))
def test_it_goes_on_from_drawn_moments(undisturbed, tmp_path, count, draw):
    moment = random.Random(f"{count}/{draw}").random()
    kill_and_go_on(undisturbed, tmp_path / "out", count, moment)


def test_other_files_begin_anew(undisturbed, tmp_path):
    files, tokenizer, expected, events = undisturbed
    output = tmp_path / "out"
    assert run(output, 1, len(events) // 2, tokenizer, files[:2]).returncode == -signal.SIGKILL
    assert list(output.glob(".corpus.partial/part-*"))
    assert run(output, 1, -1, tokenizer, files).returncode == 0
    assert bytes_of(output) == expected
