"""Sequences whose positions are sharded over several ranks."""

import math

from geojax.models.parallel.parallelism import Parallelism


def sequence_axes(parallelism: Parallelism) -> tuple[str, ...]:
    """Return the mesh axes over which the residual stream's positions are sharded."""
    axes = []
    if parallelism.context > 1:
        axes.append("context")
    if parallelism.tensor > 1 and parallelism.sequence:
        axes.append("tensor")
    return tuple(axes)


def full_sequence_length(positions: int, parallelism: Parallelism) -> int:
    """Return the length of sequences whose residual stream has `positions` positions on a rank."""
    return positions * math.prod(getattr(parallelism, axis) for axis in sequence_axes(parallelism))
