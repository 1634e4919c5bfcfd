"""Files of Megatron-LM's indexed dataset, written by the description of their format."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint16": 8, "int32": 4, "int64": 5}


def write_indexed(
    path: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    dtype: str = "uint16",
    code: int | None = None,
) -> Path:
    """Write `x.idx` and `x.bin`: each document a list of sequences, each a list of ids."""
    index, tokens = indexed_bytes(documents, dtype, code)
    path.write_bytes(index)
    path.with_suffix(".bin").write_bytes(tokens)
    return path


def indexed_bytes(
    documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16", code: int | None = None
) -> tuple[bytes, bytes]:
    """Return the contents of an index and of its file of tokens."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    size = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * size])
    bounds = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    header = struct.pack(
        "<9sQBQQ", b"MMIDIDX\0\0", 1, code or CODES[dtype], len(lengths), len(bounds)
    )
    tables = lengths.tobytes() + pointers.astype(np.int64).tobytes() + bounds.tobytes()
    return header + tables, np.concatenate(sequences).astype(dtype).tobytes()
