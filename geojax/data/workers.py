"""Worker processes that tokenize parts of files; the tokens come in the files' order.

A worker writes the tokens of a part into files of its own, and this process appends them to the
shards. No process holds more than a batch of tokens, and the shards do not depend on the number of
workers.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple

import numpy as np

from geojax.data.chat import ChatTemplate
from geojax.data.documents import ByteSpan, format_of, line_spans
from geojax.data.file_tokens import Appends, Counts, FileReader, append_tokens
from geojax.data.settings import PrepareSettings, PrepareSource
from geojax.data.storage import SPLITS, TOKENIZER, VALIDATION, SplitName
from geojax.data.tokenizer import Tokenizer
from geojax.errors import RunError

PART_BYTES = 1 << 26
"""About the bytes of JSON lines that a worker reads at a time."""
_PARTS_AHEAD = 2
"""Parts for each worker that are read while an earlier one is waited for."""
_BLOCK = 1 << 22
_POLL_SECONDS = 0.2
_REPORT_BYTES = 1 << 20


class SourcePart(NamedTuple):
    """A part of a source's files."""

    path: Path
    span: ByteSpan | None
    """Lines of the file; None: all of it."""
    split: SplitName | None
    """Split of all its documents; None: the source's share is held out."""


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

    def reader(self) -> FileReader:
        """Make the reader of the source's files."""
        tokenizer = Tokenizer.load(self.folder / TOKENIZER, beginning=self.beginning, end=self.end)
        return reader_of(self.source, self.settings, tokenizer)


def reader_of(source: PrepareSource, settings: PrepareSettings, tokenizer: Tokenizer) -> FileReader:
    """Make the reader of a source's files; the tokenizer of conversations has a template.

    Raises:
        UserError: there is no template, or it cannot be read.
    """
    template = None
    if source.format == "chat":
        assert settings.tokenizer is not None, "conversations are refused without one"
        template = ChatTemplate.load(settings.tokenizer, settings.chat_template)
    return FileReader(source, tokenizer, template)


def parts_of(
    source: PrepareSource, files: Iterable[Path], validation_files: Iterable[Path]
) -> Iterator[SourcePart]:
    """Divide a source's files: plain JSON lines into parts, others are read by one process each."""
    splits: list[tuple[Path, SplitName | None]] = [(path, None) for path in files]
    splits += [(path, VALIDATION) for path in validation_files]
    for path, split in splits:
        lines = format_of(path, source.format) in ("jsonl", "chat") and path.suffix != ".gz"
        if lines and path.stat().st_size > PART_BYTES:
            for span in line_spans(path, PART_BYTES):
                yield SourcePart(path, span, split)
        else:
            yield SourcePart(path, None, split)


def worker_count(given: int | None, total_bytes: int) -> int:
    """Choose the number of workers: what is given, or one for each core and part of the bytes."""
    if given is not None:
        return given
    return max(1, min(len(os.sched_getaffinity(0)), total_bytes // PART_BYTES))


def append_from_workers(
    setup: WorkerSetup,
    parts: Iterable[SourcePart],
    count: int,
    appends: Appends,
    advance: Callable[[int], None],
) -> Counts:
    """Append the tokens of all parts, in order, to their splits.

    Args:
        setup: what each worker needs.
        parts: the parts.
        count: number of workers.
        appends: see `append_tokens`.
        advance: told of the bytes that all workers have read since its last call.

    Raises:
        UserError: a file cannot be read, or holds something else; of several the first one.
        RunError: a worker was killed.
    """
    context = multiprocessing.get_context("spawn")  # threads of the tokenizer do not survive a fork
    shared = _Shared(context.Value("q", 0), context.Value("b", 0))
    counts = Counts()
    with concurrent.futures.ProcessPoolExecutor(
        count, mp_context=context, initializer=_start, initargs=(setup, shared)
    ) as pool:
        futures: collections.deque[concurrent.futures.Future[_Tokenized]] = collections.deque()
        try:
            for number, part in enumerate(parts):
                futures.append(pool.submit(_tokenize, part, number))
                if len(futures) > count * _PARTS_AHEAD:
                    counts.add(_take(futures.popleft(), setup, appends, shared, advance))
            while futures:
                counts.add(_take(futures.popleft(), setup, appends, shared, advance))
        except BrokenProcessPool:
            raise RunError(
                f"{setup.folder}: a worker process was killed, perhaps for want of memory; fewer "
                "--workers would need less"
            ) from None
        finally:
            shared.stopped.value = 1
            pool.shutdown(cancel_futures=True)
    return counts


class _Shared(NamedTuple):
    """Numbers that all processes see."""

    bytes_read: "Synchronized[int]"
    stopped: "Synchronized[int]"


class _Tokenized(NamedTuple):
    """A part whose tokens a worker has written."""

    number: int
    counts: Counts


class _StoppedError(Exception):
    """Ends a worker's part that nobody waits for any more."""


def _take(
    future: "concurrent.futures.Future[_Tokenized]",
    setup: WorkerSetup,
    appends: Appends,
    shared: _Shared,
    advance: Callable[[int], None],
) -> Counts:
    """Wait for a part, append its tokens, and remove its files."""
    while True:
        done, _ = concurrent.futures.wait([future], timeout=_POLL_SECONDS)
        with shared.bytes_read.get_lock():
            advance(shared.bytes_read.value)
            shared.bytes_read.value = 0
        if done:
            break
    made = future.result()
    for split in SPLITS:
        path = _part_file(setup.folder, made.number, split)
        with path.open("rb") as file:
            while len(values := np.fromfile(file, setup.dtype, _BLOCK)):
                appends[split](values)
        path.unlink()
    return made.counts


def _part_file(folder: Path, number: int, split: SplitName) -> Path:
    return folder / f"part-{number}-{split}"


class _Worker:
    """A worker process between its parts."""

    def __init__(self, setup: WorkerSetup, shared: _Shared) -> None:
        self._setup, self._shared, self._reader = setup, shared, setup.reader()
        self._unreported = 0

    def tokenize(self, part: SourcePart, number: int) -> _Tokenized:
        """Write the tokens of a part."""
        with contextlib.ExitStack() as stack:
            files = {
                split: stack.enter_context(_part_file(self._setup.folder, number, split).open("wb"))
                for split in SPLITS
            }

            def appending(split: SplitName) -> Callable[[np.ndarray], None]:
                file = files[split]
                return lambda values: values.astype(self._setup.dtype).tofile(file)

            tokens = self._reader.read(part.path, self._advance, part.span, part.split)
            counts = append_tokens(tokens, {split: appending(split) for split in SPLITS})
        self._report()
        return _Tokenized(number, counts)

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


def _tokenize(part: SourcePart, number: int) -> _Tokenized:
    assert _worker is not None, "a worker is started before its first part"
    return _worker.tokenize(part, number)


def _end_with_parent() -> None:
    """End this process with the one that started it, which may be killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
