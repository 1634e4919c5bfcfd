"""The partition of a parameter tree into trained leaves and frozen ones.

A training state keeps trained and frozen leaves apart, in two trees of the same structure. Each has
None in the place of the other's leaves. Gradients, their reduction, moments, clipping and
checkpoints use the trained tree only, and know nothing of frozen leaves. A step computes with both
in one tree in which frozen leaves are marked as `Frozen`:

    trained   {"kernel": None,      "lora_a": a}      frozen   {"kernel": w, "lora_a": None}
    combined  {"kernel": Frozen(w), "lora_a": a}

All functions take trees of arrays, or of anything else leaf by leaf.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from geojax.models.own.settings import AnyModel
from geojax.models.parameters import declarations
from geojax.precision import merge_quantized, split_quantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """A leaf that no gradient is taken of."""

    value: Any


def is_frozen(leaf: object) -> bool:
    """Return True for a `Frozen` leaf."""
    return isinstance(leaf, Frozen)


def mark_frozen(config: AnyModel, parameters: Any) -> Any:
    """Mark the leaves of a tree like `parameter_shapes` that are frozen: with adapters all others.

    A model without adapters has none.
    """
    if config.lora is None:
        return parameters

    def mark(leaf: Any, declared: Any) -> Any:
        return leaf if declared.kind == "adapter" else Frozen(leaf)

    return jax.tree.map(mark, parameters, declarations(config))


def combine(trained: Any, frozen: Any) -> Any:
    """Return all leaves in one tree, those of `frozen` marked; None: nothing is frozen."""
    if frozen is None:
        return trained
    return jax.tree.map(
        lambda own, other: own if other is None else Frozen(other),
        trained,
        frozen,
        is_leaf=lambda leaf: leaf is None,
    )


def trained_part(weights: Any) -> Any:
    """Return the leaves that gradients are taken of: all but the frozen ones.

    Of weights that are quantized it is what their gradient is taken with respect to.
    """
    return split_trained(weights).trained


def frozen_part(weights: Any) -> Any:
    """Return the frozen leaves, without their marks; None: there are none."""
    frozen = jax.tree.map(
        lambda leaf: leaf.value if is_frozen(leaf) else None, weights, is_leaf=is_frozen
    )
    return frozen if jax.tree.leaves(frozen) else None


def unmarked(weights: Any) -> Any:
    """Return all leaves without marks, as a model computes with them."""
    return jax.tree.map(
        lambda leaf: leaf.value if is_frozen(leaf) else leaf, weights, is_leaf=is_frozen
    )


class SplitWeights(NamedTuple):
    """The parts of a tree of weights."""

    trained: Any
    """The part that gradients are taken of."""
    frozen: Any
    """The frozen leaves, marked."""
    quantized: Any
    """See `split_quantized`."""

    def merge(self, trained: Any) -> Any:
        """Return the tree of weights with `trained`, which may be under differentiation."""
        merged = merge_quantized(self.quantized, trained)
        return jax.tree.map(
            lambda own, other: own if other is None else other,
            merged,
            self.frozen,
            is_leaf=lambda leaf: leaf is None,
        )


def split_trained(weights: Any) -> SplitWeights:
    """Split a tree of weights into the part that gradients are taken of and the rest."""
    frozen = jax.tree.map(
        lambda leaf: leaf if is_frozen(leaf) else None, weights, is_leaf=is_frozen
    )
    others = jax.tree.map(
        lambda leaf: None if is_frozen(leaf) else leaf, weights, is_leaf=is_frozen
    )
    quantized, trained = split_quantized(others)
    return SplitWeights(trained, frozen, quantized)
