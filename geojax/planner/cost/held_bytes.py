"""Bytes that a layer holds of a microbatch, of its traced passes."""

from typing import Any

import jax

from geojax.models.chunk.residuals import Residuals
from geojax.models.chunk.split_backward import SplitBackward
from geojax.pipeline.schedule import LayerBytes


def held_bytes(residuals: Residuals, again: Any, cotangents: Any, *, split: bool) -> LayerBytes:
    """Return what a layer holds of a microbatch, by its traced forward.

    Args:
        residuals: of its forward.
        again: what its backward reads beside them.
        cotangents: of its results.
        split: True if its backward is split.
    """

    def count(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    kept = count(residuals.saved)
    if not split:
        return LayerBytes(kept, kept, 0)
    halves = SplitBackward.of(residuals, again, cotangents)
    _, stash = halves.input_gradient(residuals, again, cotangents)
    stashed = count(stash.values)
    read_later = count([residuals.saved[position] for position in halves.residuals_read_later])
    return LayerBytes(kept, kept + stashed, read_later + stashed)
