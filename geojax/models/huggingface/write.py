"""Writing a Hugging Face checkpoint: safetensors files of bounded size, their index, the config.

A leaf of geojax holds all layers, a tensor one, and a saved run holds blocks of leaves. So that
each block is read once, the files are laid out first and then filled in any order.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax.numpy as jnp
import numpy as np

from geojax.models.config import ModelConfig
from geojax.models.huggingface.checkpoint import CONFIG, family_for
from geojax.models.huggingface.tensor_map import Tensor, TensorMap
from geojax.models.huggingface.weight_files import DTYPES, INDEX, SINGLE

FILE_BYTES = 5 * 10**9
"""Most bytes of a safetensors file, unless one tensor has more."""


class CheckpointWriter:
    """A checkpoint in an empty folder; it is complete when the `with` block ends."""

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        *,
        dtype: str,
        token_ids: Mapping[str, int | list[int]],
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Write the configs and the index, and lay out the files.

        Args:
            folder: an existing folder.
            model: the model.
            dtype: name of the dtype to write, as "bfloat16"; `TensorRule.wide` tells exceptions.
            token_ids: numbers of special tokens, by key of config.json.
            file_bytes: most bytes of one safetensors file.

        Raises:
            UserError: no family of transformers can express the model.
        """
        family = family_for(model)
        self._map = TensorMap(family, model)
        self._dtype = jnp.dtype(dtype)
        self._tensors: dict[str, np.ndarray] = {}
        self._names = {name: [name] for name in self._map.tensors}
        for copy, source in self._map.copies.items():
            self._names[source].append(copy)
        self._written = dict.fromkeys((*self._map.tensors, *self._map.copies), 0)
        files = self._divide(file_bytes)
        for name, content in files.items():
            self._lay_out(folder / name, content)
        if len(files) > 1:
            weight_map = {each.name: file for file, content in files.items() for each in content}
            size = sum(array.nbytes for array in self._tensors.values())
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            _write_json(folder / INDEX, index)
        config = family.write_config(model) | {"torch_dtype": dtype, **token_ids}
        _write_json(folder / CONFIG, config)
        _write_json(folder / "generation_config.json", dict(token_ids))

    @property
    def leaves(self) -> list[str]:
        """Names of the leaves to write."""
        return list(self._map.parts)

    def put(self, leaf: str, indices: tuple[np.ndarray, ...], values: np.ndarray) -> None:
        """Write a block of a leaf.

        Args:
            leaf: name of the leaf.
            indices: along each dim the indices of the block in the leaf; consecutive, but along the
                dims of layers and experts.
            values: the block.
        """
        stacked = self._map.stacked_dims[leaf]
        for dim in indices[stacked:]:
            assert (np.diff(dim) == 1).all(), "a block is contiguous within a part"
        inside = tuple(slice(int(dim[0]), int(dim[-1]) + 1) for dim in indices[stacked:])
        for position in np.ndindex(values.shape[:stacked]):
            stack = tuple(int(dim[at]) for dim, at in zip(indices, position, strict=False))
            location = self._map.locate(leaf, stack)
            part = values[position]
            for name in self._names[location.tensor.name]:
                self._tensors[name][location.in_tensor(inside)] = location.transpose(part)
                self._written[name] += part.size

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            lacking = [n for n, array in self._tensors.items() if self._written[n] < array.size]
            assert not lacking, f"not all of {lacking} was written"
        self._tensors.clear()

    def _divide(self, file_bytes: int) -> dict[str, list[Tensor]]:
        """Divide the tensors among files, in order."""
        contents: list[list[Tensor]] = [[]]
        filled = 0
        copies = self._map.copies.items()
        again = [self._map.tensors[source]._replace(name=copy) for copy, source in copies]
        for tensor in (*self._map.tensors.values(), *again):
            size = self._bytes_of(tensor)
            if contents[-1] and filled + size > file_bytes:
                contents.append([])
                filled = 0
            contents[-1].append(tensor)
            filled += size
        return dict(zip(_file_names(len(contents)), contents, strict=True))

    def _bytes_of(self, tensor: Tensor) -> int:
        return int(np.prod(tensor.shape, dtype=np.int64)) * self._dtype_of(tensor).itemsize

    def _dtype_of(self, tensor: Tensor) -> np.dtype:
        return np.promote_types(self._dtype, np.float32) if tensor.rule.wide else self._dtype

    def _lay_out(self, path: Path, content: list[Tensor]) -> None:
        """Write a file's header and map its tensors into memory.

        The format: the header's size as 8 bytes, the header as JSON padded with spaces to a
        multiple of 8, and the tensors (https://huggingface.co/docs/safetensors/index#format).
        """
        theirs = {own: name for name, own in DTYPES.items()}
        # Readers want each tensor to begin at a multiple of its numbers' size.
        content = sorted(content, key=lambda tensor: -self._dtype_of(tensor).itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends = np.cumsum([0, *map(self._bytes_of, content)]).tolist()
        for tensor, first, end in zip(content, ends, ends[1:], strict=False):
            header[tensor.name] = {
                "dtype": theirs[self._dtype_of(tensor).name],
                "shape": list(tensor.shape),
                "data_offsets": [first, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            # A full disk is an error here; in a mapped file it would kill the process.
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + ends[-1])
        mapped = np.memmap(path, np.uint8, mode="r+", offset=8 + len(text))
        for tensor, first, end in zip(content, ends, ends[1:], strict=False):
            array = mapped[first:end].view(self._dtype_of(tensor)).reshape(tensor.shape)
            self._tensors[tensor.name] = array


def _file_names(count: int) -> Iterator[str]:
    if count == 1:
        yield SINGLE
        return
    for number in range(1, count + 1):
        yield f"model-{number:05}-of-{count:05}.safetensors"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
