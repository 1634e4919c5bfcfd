"""The safetensors files of one checkpoint: their names, headers and slices."""

import functools
import hashlib
import json
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from geojax.errors import UserError
from geojax.json_file import load_json
from geojax.models.huggingface.tensor_map import InTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

LARGEST_WEIGHT = 1e18
"""Largest magnitude of a number that can be a weight: its square is finite in float32, in which
norms are computed."""

_COMPARED = 1 << 22
"""Numbers that are compared at a time."""

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Dtypes of weights by their safetensors names."""


class Header(NamedTuple):
    """The shape of a tensor in its file, and the dtypes that it may have there."""

    shape: tuple[int, ...]
    dtypes: Collection[str] = DTYPES.keys()
    """Dtypes that would do, by their safetensors names."""


class WeightFiles:
    """The files of a folder with an index, or the one file of a folder without."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Read the index of `folder`, or else the names in its one file.

        Args:
            folder: the folder.
            prefix: beginning of the names of a whole model's tensors but for its head; a file of
                the model without a head, in which no name has it, is read as if all had.

        Raises:
            UserError: there is neither, or the index is none or names a file outside the folder.
        """
        self.folder = folder
        if (folder / INDEX).exists():
            self.file_of = _files_of_index(folder / INDEX)
            self.source = str(folder / INDEX)
        elif (folder / SINGLE).exists():
            self.file_of = dict.fromkeys(_names_in(folder / SINGLE), SINGLE)
            self.source = str(folder / SINGLE)
        else:
            raise UserError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
        self._left_out = "" if any(name.startswith(prefix) for name in self.file_of) else prefix
        if self._left_out:
            self.file_of = {f"{prefix}{name}": file for name, file in self.file_of.items()}

    def check_names(self, names: Collection[str], ignored: str | None) -> None:
        """Check that the checkpoint holds these tensors and, but for `ignored` ones, no others.

        Raises:
            UserError: one is missing or unexpected.
        """
        if missing := [name for name in names if name not in self.file_of]:
            raise UserError(f"{self.source}: lacks {_first_of(missing)}, which the model has")
        others = [name for name in self.file_of if name not in names]
        if ignored is not None:
            others = [name for name in others if not re.fullmatch(ignored, name)]
        if others:
            raise UserError(f"{self.source}: holds {_first_of(others)}, which the model has not")

    def check_headers(self, headers: Mapping[str, Header]) -> None:
        """Check the shape and the dtype of each tensor by name, of which each file has a header.

        Raises:
            UserError: one differs, or a file is missing or damaged.
        """
        for file in sorted({self.file_of[name] for name in headers}):
            reader = self._open(file)
            for name, header in headers.items():
                if self.file_of[name] != file:
                    continue
                found = self._slice_of(reader, name, self.folder / file)
                where, shape = f"{self.folder / file}: {name}", tuple(found.get_shape())
                if shape != header.shape:
                    raise UserError(
                        f"{where} has shape {list(shape)}, and the model's is {list(header.shape)}"
                    )
                if (dtype := found.get_dtype()) not in header.dtypes:
                    would_do = ", ".join(header.dtypes)
                    raise UserError(f"{where} has dtype {dtype}; {would_do} would do")

    def digest(self, headers: Mapping[str, Header]) -> str:
        """Return a digest of all tensors' names, shapes and first 1,024 numbers.

        It tells one model's weights from another's.

        Raises:
            UserError: a file is missing or damaged, or a tensor has another shape or dtype.
        """
        self.check_headers(headers)
        found = hashlib.sha256()
        for name, (shape, _) in sorted(headers.items()):
            *rows, columns = shape or (1,)
            first = (*(slice(0, 1) for _ in rows), slice(0, min(columns, 1024)))
            numbers = self.read(name, first if shape else ())
            found.update(f"{name} {shape} {numbers.dtype} ".encode() + numbers.tobytes())
        return found.hexdigest()

    def read(self, name: str, part: InTensor) -> np.ndarray:
        """Read a part of a tensor, in its own dtype, and but for skipped ones no other byte.

        Raises:
            UserError: the file is missing or damaged, or a number in it is no weight.
        """
        path = self.folder / self.file_of[name]
        found = self._slice_of(self._open(path.name), name, path)
        steps = tuple(slice(None, None, at.step) for at in part if isinstance(at, slice))
        together = (slice(at.start, at.stop) if isinstance(at, slice) else at for at in part)
        array: np.ndarray = found[tuple(together)]
        if array.dtype.itemsize > 1:  # others are codes
            self.refuse_no_weights(name, array)
        return array[steps]

    def refuse_no_weights(self, name: str, numbers: np.ndarray) -> None:
        """Refuse numbers of the tensor `name` that cannot be weights.

        Raises:
            UserError: one is NaN, infinite or beyond `LARGEST_WEIGHT`.
        """
        if not are_weights(numbers):
            raise UserError(
                f"{self.folder / self.file_of[name]}: {name} holds numbers that are no weights "
                f"(NaN, infinite or beyond {LARGEST_WEIGHT:g}); the file is damaged, or the "
                "training that wrote it had diverged"
            )

    def are_equal(self, first: str, second: str) -> bool:
        """Return True if two tensors have the same shape and the same numbers.

        Raises:
            UserError: a file is missing or damaged.
        """
        one, other = (
            self._slice_of(self._open(self.file_of[name]), name, self.folder / self.file_of[name])
            for name in (first, second)
        )
        shape = tuple(one.get_shape())
        if shape != tuple(other.get_shape()):
            return False
        rows = max(1, _COMPARED // max(1, *shape[1:]))
        blocks = (slice(row, min(row + rows, shape[0])) for row in range(0, shape[0], rows))
        return all(np.array_equal(one[block], other[block]) for block in blocks)

    def _open(self, file: str) -> Any:
        return _open(self.folder / file)

    def _slice_of(self, reader: Any, name: str, path: Path) -> Any:
        try:
            return reader.get_slice(name.removeprefix(self._left_out))
        except safetensors.SafetensorError:
            raise UserError(f"{path}: lacks {name}, which {INDEX} says it holds") from None


def are_weights(numbers: np.ndarray) -> bool:
    """Return True if all numbers are finite and at most `LARGEST_WEIGHT`, signs aside.

    Floats are ordered as the integers that their bits are: first those with sign 0, and as unsigned
    integers then those with sign 1. Two maxima of integers take no copy, and no time beside the
    reading.
    """
    if numbers.size == 0:
        return True
    size = numbers.dtype.itemsize
    largest = min(LARGEST_WEIGHT, float(ml_dtypes.finfo(numbers.dtype).max))
    bound = int(np.asarray(largest, numbers.dtype).view(f"u{size}"))
    above = int(numbers.view(f"i{size}").max()) > bound
    below = int(numbers.view(f"u{size}").max()) > bound + (1 << (8 * size - 1))
    return not (above or below)


@functools.lru_cache(maxsize=2)
def _open(path: Path) -> Any:
    """Map a file into memory; the pages of the two that were read last may stay there."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise UserError(f"{path}: is no regular file; a safetensors file would do")
        return safetensors.safe_open(path, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({_short(error)})") from None


def _names_in(path: Path) -> list[str]:
    return list(_open(path).keys())


def _files_of_index(path: Path) -> dict[str, str]:
    """Read the file's name of each tensor.

    Raises:
        UserError: the file is no such index, or a name is none of a file beside it.
    """
    found = load_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path}: has no weight_map, the file's name of each tensor")
    for name, file in found.items():
        if not isinstance(file, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", file):
            raise UserError(
                f"{path}: {name} is in {json.dumps(file)[:80]}; "
                "the name of a file beside it would do"
            )
    return found


def _first_of(names: list[str]) -> str:
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def _short(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).splitlines()[0]
