"""Documents that are tokenized already, in Megatron-LM's indexed dataset: `x.idx` beside `x.bin`.

After a header the index holds three arrays: the tokens of each sequence (int32), the byte at which
it begins (int64), and the first sequence of each document (int64). The last entry of the third is
the number of sequences. The `.bin` file is nothing but tokens. Source:
megatron/core/datasets/indexed_dataset.py.
"""

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
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class TokenPiece(NamedTuple):
    """A part of a document's tokens; `first` and `last` mark the document's ends."""

    ids: np.ndarray
    first: bool
    last: bool


class _Index(NamedTuple):
    """The tables of an index, mapped from the file."""

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray


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
    tokens_path = path.with_suffix(".bin")
    try:
        index = _read_index(path, tokens_path.stat().st_size)
        tokens = np.memmap(tokens_path, index.dtype, "r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    bounds = zip(index.documents[:-1].tolist(), index.documents[1:].tolist(), strict=True)
    for number, (begin, end) in enumerate(bounds):
        if begin == end:
            continue
        start = int(index.pointers[begin]) // index.dtype.itemsize
        stop = start + int(index.lengths[begin:end].sum(dtype=np.int64))
        whole = stop - start
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
        advance(whole * index.dtype.itemsize)


def _read_index(path: Path, tokens_bytes: int) -> _Index:
    """Map the tables of an index; a ValueError says what is wrong with it."""
    content = np.memmap(path, np.uint8, "r")
    if content[:9].tobytes() != _MAGIC:
        raise ValueError("no index of Megatron-LM's: it begins with other bytes")
    if len(content) < _HEADER.size:
        raise ValueError("it ends within its header")
    _, version, code, sequences, documents = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if version != _VERSION or code not in _DTYPES:
        raise ValueError(f"version {version} with the data type {code}, which is no type of tokens")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if documents < 1 or len(content) != expected:
        raise ValueError(f"{len(content):,} bytes long where its header says {expected:,}")
    pointers_begin = _HEADER.size + 4 * sequences
    documents_begin = pointers_begin + 8 * sequences
    index = _Index(
        np.dtype(_DTYPES[code]),
        content[_HEADER.size : pointers_begin].view(np.int32),
        content[pointers_begin:documents_begin].view(np.int64),
        content[documents_begin:].view(np.int64),
    )
    ends = index.pointers + index.lengths.astype(np.int64) * index.dtype.itemsize
    if (
        (index.lengths < 0).any()
        or not np.array_equal(index.pointers, np.concatenate([[0], ends[:-1]])[:sequences])
        or (np.diff(index.documents) < 0).any()
        or (index.documents[0], index.documents[-1]) != (0, sequences)
    ):
        raise ValueError("its sequences do not follow one another")
    if sequences and int(ends[-1]) != tokens_bytes:
        raise ValueError(
            f"it describes {int(ends[-1]):,} bytes of tokens, and {path.with_suffix('.bin').name} "
            f"has {tokens_bytes:,}"
        )
    return index
