"""The weights of a saved run with adapters, merged into those that they adapt."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from geojax.checkpoint.reading.initial_weights import InitialWeights, read_weights
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.checkpoint.saved_array import Indices
from geojax.models import AnyModel, parameter_kinds, parameter_shapes
from geojax.models.huggingface.tensor_map import Slices
from geojax.models.lora import LoraSettings, adapter_names, merged_kernel
from geojax.named_arrays import leaves_by_name


@dataclasses.dataclass(frozen=True)
class MergedWeights:
    """The parts of merged weights, as `geojax.checkpoint.reading.initial_weights` reads them."""

    base: InitialWeights
    """The frozen weights."""
    adapters: Mapping[str, np.ndarray]
    """The leaves of the adapters, by name."""
    settings: LoraSettings

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """Number of leading dims of each leaf, by name, that count layers and experts."""
        return self.base.stacked_dims

    def check(self) -> None:
        """Check the files of the frozen weights.

        Raises:
            UserError: see `PartReader.check`.
        """
        self.base.check()

    def read(self, leaf: str, stack: tuple[int, ...], slices: Slices) -> np.ndarray:
        """Read `slices` of a leaf's part; a merged one is in at least float32."""
        part = self.base.read(leaf, stack, slices)
        names = adapter_names(leaf)
        if names is None or names[0] not in self.adapters:
            return part
        (a, b), (rows, columns) = (self.adapters[name] for name in names), slices
        kernel: np.ndarray = merged_kernel(
            part, a[stack][rows], b[stack][:, columns], self.settings
        )
        return kernel


@dataclasses.dataclass(frozen=True)
class MergedModel:
    """The merged weights of a run, read like a `SavedModel`."""

    saved: SavedModel
    """The save, which has the adapters."""
    base: InitialWeights
    """The frozen weights."""
    model: AnyModel
    """The model with its adapters."""

    @functools.cached_property
    def adapters(self) -> dict[str, np.ndarray]:
        """The leaves of the adapters, whole, by name."""
        kind_of = parameter_kinds(self.model)
        return {
            name: self.saved.whole(name, leaf.shape)
            for name, leaf in leaves_by_name(parameter_shapes(self.model)).items()
            if kind_of(name) == "adapter"
        }

    @property
    def merged(self) -> MergedWeights:
        """The merged weights, part by part."""
        assert self.model.lora is not None, "the model must have adapters"
        return MergedWeights(self.base, self.adapters, self.model.lora)

    def read(self, layouts: Any, mesh: Mesh) -> Any:
        """Read the weights onto a mesh; arguments as `SavedModel.read`."""
        return read_weights(self.merged, layouts, mesh)

    def blocks(self, leaf: str) -> Iterator[tuple[Indices, np.ndarray]]:
        """Yield the weight `leaf` in blocks, as `SavedModel.blocks` does: here its parts."""
        merged = self.merged
        shape = leaves_by_name(parameter_shapes(self.model))[leaf].shape
        stacked = merged.stacked_dims[leaf]
        inside = tuple(np.arange(size) for size in shape[stacked:])
        slices = tuple(slice(0, size) for size in shape[stacked:])
        for stack in np.ndindex(shape[:stacked]):
            indices = (*(np.array([number]) for number in stack), *inside)
            part = merged.read(leaf, stack, slices)
            yield indices, part.reshape((1,) * stacked + part.shape)
