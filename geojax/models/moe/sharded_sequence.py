"""Rows whose columns are spread over several ranks."""

import math

from geojax.models.parallel.parallelism import Parallelism


def sequence_axes(parallelism: Parallelism) -> tuple[str, ...]:
    """The mesh axes whose ranks hold different columns of the same rows of the residual stream."""
    axes = []
    if parallelism.context > 1:
        axes.append("context")
    if parallelism.tensor > 1 and parallelism.sequence:
        axes.append("tensor")
    return tuple(axes)


def full_sequence_length(columns: int, parallelism: Parallelism) -> int:
    """Of whole rows, of whose residual stream a rank holds `columns` columns."""
    return columns * math.prod(getattr(parallelism, axis) for axis in sequence_axes(parallelism))
