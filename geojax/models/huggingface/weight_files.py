"""The safetensors files of one checkpoint: their names, headers and slices."""

import functools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from geojax.errors import UserError
from geojax.models.huggingface.json_file import load_json
from geojax.models.huggingface.tensor_map import InTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Dtypes of weights by their safetensors names."""


class Header(NamedTuple):
    """The shape of a tensor in its file, and the dtypes that it may have there."""

    shape: tuple[int, ...]
    dtypes: Collection[str] = DTYPES.keys()
    """Dtypes that would do, by their safetensors names."""


class WeightFiles:
    """The files of a folder with an index, or the one file of a folder without."""

    def __init__(self, folder: Path) -> None:
        """Read the index of `folder`, or else the names in its one file.

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
                found = _slice_of(reader, name, self.folder / file)
                where, shape = f"{self.folder / file}: {name}", tuple(found.get_shape())
                if shape != header.shape:
                    raise UserError(
                        f"{where} has shape {list(shape)}, and the model's is {list(header.shape)}"
                    )
                if (dtype := found.get_dtype()) not in header.dtypes:
                    would_do = ", ".join(header.dtypes)
                    raise UserError(f"{where} has dtype {dtype}; {would_do} would do")

    def read(self, name: str, part: InTensor) -> np.ndarray:
        """Read a part of a tensor, in its own dtype, and but for skipped ones no other byte.

        Raises:
            UserError: the file is missing or damaged.
        """
        path = self.folder / self.file_of[name]
        found = _slice_of(self._open(path.name), name, path)
        steps = tuple(slice(None, None, at.step) for at in part if isinstance(at, slice))
        together = (slice(at.start, at.stop) if isinstance(at, slice) else at for at in part)
        array: np.ndarray = found[tuple(together)]
        return array[steps]

    def _open(self, file: str) -> Any:
        return _open(self.folder / file)


@functools.lru_cache(maxsize=2)
def _open(path: Path) -> Any:
    """Map a file into memory; the pages of the two that were read last may stay there."""
    try:
        return safetensors.safe_open(path, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({_short(error)})") from None


def _slice_of(reader: Any, name: str, path: Path) -> Any:
    try:
        return reader.get_slice(name)
    except safetensors.SafetensorError:
        raise UserError(f"{path}: lacks {name}, which {INDEX} says it holds") from None


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
