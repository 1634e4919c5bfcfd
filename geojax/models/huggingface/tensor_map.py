"""The tensors of one model in a family's checkpoint, and the parts of its leaves that they hold.

A *part* is one layer's, and one expert's, share of a leaf of `parameter_shapes`: the leaf without
its leading dims of layers and experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from geojax.models.config import ModelConfig
from geojax.models.huggingface.family import Family, TensorRule
from geojax.models.parameters import parameter_shapes
from geojax.named_arrays import leaves_by_name

Slices = tuple[slice, ...]
InTensor = tuple[int | slice, ...]
"""Part of a tensor: an index or a slice of each dim."""


class Tensor(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    rule: TensorRule


class PartLocation(NamedTuple):
    """The tensor that holds a part, and where."""

    tensor: Tensor
    first: int
    """Position of the part along the last dim of the tensor before it is transposed."""
    step: int
    """Distance of the part's elements along that dim."""
    expert: tuple[int, ...]
    """Number of the part's expert, in a tensor that stacks experts; else empty."""

    def in_tensor(self, slices: Slices) -> InTensor:
        """Return what of the tensor holds `slices` of the part."""
        *others, last = slices
        start, length = self.first + self.step * last.start, last.stop - last.start
        inside = (*others, slice(start, start + self.step * (length - 1) + 1, self.step))
        return *self.expert, *(inside[::-1] if self.tensor.rule.transposed else inside)

    def transpose(self, array: np.ndarray) -> np.ndarray:
        """Turn slices of the tensor into those of the part, and those of the part back."""
        return array.T if self.tensor.rule.transposed else array


class TensorMap:
    """The tensors of `model` in a checkpoint of `family`, both ways."""

    def __init__(self, family: Family, model: ModelConfig) -> None:
        """Apply the family's table, which must cover every leaf of the model."""
        self.tensors: dict[str, Tensor] = {}
        """The tensors by name, in the table's order, layer by layer."""
        self.stacked_dims: dict[str, int] = {}
        """Number of leading dims of each leaf, by name, that count layers and experts."""
        self.parts: dict[str, tuple[int, ...]] = {}
        """Shape of a part of each leaf, by name."""
        self.copies: dict[str, str] = {}
        """The tensors that hold another one once more, by name: the name of that one."""
        self._locations: dict[tuple[str, tuple[int, ...]], PartLocation] = {}
        shapes = {
            name: leaf.shape for name, leaf in leaves_by_name(parameter_shapes(model)).items()
        }
        for rule in family.tensors:
            if rule.leaves[0] in shapes and (rule.only_for is None or rule.only_for(model)):
                first = _first_layer(rule.leaves[0], model)
                self._apply(rule, [shapes[leaf] for leaf in rule.leaves], first)
        for number in range(model.num_nextn_predict_layers):
            for copy, source in family.copies.items():
                if source in self.tensors:
                    self.copies[copy.format(layer=model.num_hidden_layers + number)] = source
        lacking = shapes.keys() - self.stacked_dims.keys()
        assert not lacking, f"the table of {family.model_type} lacks {sorted(lacking)}"

    def locate(self, leaf: str, stack: tuple[int, ...]) -> PartLocation:
        """Return where the part `stack` of a leaf lies; `stack` is () for a leaf without layers."""
        return self._locations[leaf, stack]

    def _apply(self, rule: TensorRule, shapes: Sequence[tuple[int, ...]], first_layer: int) -> None:
        named = ("{layer}" in rule.name) + ("{expert}" in rule.name)
        stacked = named + rule.stacks_experts
        parts = [shape[stacked:] for shape in shapes]
        widths = [part[-1] for part in parts]
        self.stacked_dims |= dict.fromkeys(rule.leaves, stacked)
        self.parts |= dict(zip(rule.leaves, parts, strict=True))
        whole = (*parts[0][:-1], sum(widths))
        shape = (*shapes[0][named:stacked], *(whole[::-1] if rule.transposed else whole))
        for stack in np.ndindex(shapes[0][:stacked]):
            numbers = [first_layer + stack[0], *stack[1:]] if stack else []
            name = rule.name.format(**dict(zip(("layer", "expert"), numbers, strict=False)))
            tensor = self.tensors.setdefault(name, Tensor(name, shape, rule))
            for number, leaf in enumerate(rule.leaves):
                first, step = sum(widths[:number]), 1
                if rule.interleaved:
                    first, step = number, len(widths)
                location = PartLocation(tensor, first, step, stack[named:])
                self._locations[leaf, stack] = location


def _first_layer(leaf: str, model: ModelConfig) -> int:
    """Return the number in checkpoints of the first layer of a stack."""
    if leaf.startswith("layers."):
        return model.first_k_dense_replace
    return model.num_hidden_layers if leaf.startswith("mtp.") else 0
