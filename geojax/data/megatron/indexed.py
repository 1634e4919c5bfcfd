"""Megatron-LM's indexed dataset of documents that are tokenized already: `x.idx` beside `x.bin`.

After a header the index holds three arrays: the tokens of each sequence (int32), the byte at which
it begins (int64), and the first sequence of each document (int64). The last entry of the third is
the number of sequences. The `.bin` file is nothing but tokens. Source:
megatron/core/datasets/indexed_dataset.py.
"""

import contextlib
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError

SUFFIX = ".idx"
PIECE_TOKENS = 1 << 22
"""Most tokens of a document that are in memory at once."""

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_BLOCK_SEQUENCES = 1 << 20
"""Sequences whose table entries are checked at once."""
_MOST_BYTES = 1 << 60
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class TokenPiece(NamedTuple):
    """A part of a document's tokens; `first` and `last` mark the document's ends."""

    ids: np.ndarray
    first: bool
    last: bool


class IndexedTokens(NamedTuple):
    """The tables of an index and the tokens that it describes, mapped from the two files."""

    tokens: np.ndarray
    """All tokens, in the type of the file."""
    lengths: np.ndarray
    """int32: tokens of each sequence."""
    pointers: np.ndarray
    """int64: byte at which each sequence begins."""
    documents: np.ndarray
    """int64: first sequence of each document, and at last the number of sequences."""

    def lengths_of(self, sequences: np.ndarray) -> np.ndarray:
        """Return the numbers of tokens (int32) of `sequences`."""
        return self.lengths[sequences]

    def first_tokens(self, sequences: np.ndarray) -> np.ndarray:
        """Return the positions (int64) of the tokens with which `sequences` begin."""
        return self.pointers[sequences] // self.tokens.itemsize


def read_indexed(
    path: Path,
    tokenizer: Tokenizer,
    advance: Callable[[int], None] = lambda bytes_read: None,
) -> Iterator[TokenPiece]:
    """Read the documents of the index `path` without the tokens that begin or end them.

    `advance` is called with the number of bytes of tokens read since its last call. Empty documents
    are left out.

    Raises:
        UserError: a file is missing or no such file, the two do not belong together, or a document
            has a token that `tokenizer` lacks.
    """
    index = open_indexed(path)
    tokens, itemsize = index.tokens, index.tokens.itemsize
    bounds = zip(index.documents[:-1].tolist(), index.documents[1:].tolist(), strict=True)
    for number, (begin, end) in enumerate(bounds):
        whole = int(index.lengths[begin:end].sum(dtype=np.int64))
        if not whole:
            continue
        start = int(index.pointers[begin]) // itemsize
        stop = start + whole
        # Documents usually end with Megatron's end-of-document token; geojax frames them itself.
        start += tokens[start] == tokenizer.bos_id
        stop -= start < stop and tokens[stop - 1] == tokenizer.eos_id
        for offset in range(start, stop, PIECE_TOKENS):
            piece = np.asarray(tokens[offset : min(offset + PIECE_TOKENS, stop)], np.int64)
            low, high = int(piece.min()), int(piece.max())
            if low < 0 or high >= tokenizer.vocabulary_size:
                raise UserError(
                    f"{path}: document {number} has the token {low if low < 0 else high:,}, and "
                    f"the tokenizer {tokenizer.vocabulary_size:,} tokens; give the tokenizer.json "
                    "that made these tokens"
                )
            yield TokenPiece(piece, offset == start, offset + len(piece) == stop)
        advance(whole * itemsize)


class _Header(NamedTuple):
    """Type of the tokens, and the lengths of the index's tables."""

    dtype: np.dtype
    sequences: int
    documents: int


def check_header(path: Path) -> None:
    """Read the header of the index `path`, and look for the tokens beside it.

    Raises:
        UserError: a file is missing or no such file.
    """
    with _in_one_line(path):
        _read_header(path)


def open_indexed(path: Path) -> IndexedTokens:
    """Map the index `path` and the file of tokens beside it, and check that they fit each other.

    The tables are read once, in blocks; of the tokens nothing is read.

    Raises:
        UserError: a file is missing or no such file, or the two do not belong together.
    """
    with _in_one_line(path):
        return _open(path)


@contextlib.contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    """Say in one line what is wrong with the files of an index.

    Raises:
        UserError: something is.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _read_header(path: Path) -> _Header:
    """Read the header of an index; a ValueError says what is wrong with it."""
    tokens_path = path.with_suffix(".bin")
    for file in (path, tokens_path):  # a pipe would be waited for, a device never ends
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{file.name} is no regular file")
    with path.open("rb") as index:
        content = index.read(_HEADER.size)
    if content[: len(_MAGIC)] != _MAGIC:
        raise ValueError("no index of Megatron-LM's: it begins with other bytes")
    if len(content) < _HEADER.size:
        raise ValueError("it ends within its header")
    _, version, code, sequences, documents = _HEADER.unpack(content)
    if version != _VERSION or code not in _DTYPES:
        raise ValueError(f"version {version} with the data type {code}, which is no type of tokens")
    expected, size = _HEADER.size + 12 * sequences + 8 * documents, path.stat().st_size
    if documents < 1 or size != expected:
        raise ValueError(f"{size:,} bytes long where its header says {expected:,}")
    return _Header(np.dtype(_DTYPES[code]), sequences, documents)


def _open(path: Path) -> IndexedTokens:
    """Map both files; a ValueError says what is wrong with them."""
    header, tokens_path = _read_header(path), path.with_suffix(".bin")
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    pointers_begin = _HEADER.size + 4 * header.sequences
    documents_begin = pointers_begin + 8 * header.sequences
    lengths = content[_HEADER.size : pointers_begin].view(np.int32)
    pointers = content[pointers_begin:documents_begin].view(np.int64)
    bounds = content[documents_begin:].view(np.int64)
    end = _end_of_sequences(lengths, pointers, header.dtype.itemsize)
    if end is None or not _is_partition(bounds, header.sequences):
        raise ValueError("its sequences do not follow one another")
    if end != (size := tokens_path.stat().st_size):
        raise ValueError(
            f"it describes {end:,} bytes of tokens, and {tokens_path.name} has {size:,}"
        )
    # A map needs a byte.
    tokens = np.memmap(tokens_path, header.dtype, "r") if end else np.empty(0, header.dtype)
    return IndexedTokens(np.asarray(tokens), lengths, pointers, bounds)


def _end_of_sequences(lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int | None:
    """Return the byte behind the last sequence; None: they do not follow one another."""
    end = 0
    for start in range(0, len(lengths), _BLOCK_SEQUENCES):
        sizes = lengths[start : start + _BLOCK_SEQUENCES].astype(np.int64) * itemsize
        ends = end + np.cumsum(sizes)
        begins = pointers[start : start + _BLOCK_SEQUENCES]
        # The sums of a block cannot overflow, and a pointer beyond what a file can hold is wrong.
        if (sizes < 0).any() or not np.array_equal(begins, ends - sizes):
            return None
        end = int(ends[-1])
        if end > _MOST_BYTES:
            return None
    return end


def _is_partition(bounds: np.ndarray, sequences: int) -> bool:
    """Return True if documents with these bounds hold every sequence once."""
    if (bounds[0], bounds[-1]) != (0, sequences):
        return False
    for start in range(0, len(bounds), _BLOCK_SEQUENCES):
        block = bounds[start : start + _BLOCK_SEQUENCES + 1]
        if (block[1:] < block[:-1]).any():
            return False
    return True
