"""Bytes that a device sends, by the mesh axes that they cross."""

import collections
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from geojax.mesh import AXES
from geojax.step.plan import StepPlan

Axes = tuple[str, ...]
BytesByAxes = collections.defaultdict[Axes, Fraction]
"""The bytes that a device sends, by the axes, longer than 1, of the collectives."""


def no_bytes() -> BytesByAxes:
    """Start a sum."""
    return collections.defaultdict(Fraction)


def add(total: BytesByAxes, sent: Mapping[Axes, Fraction], times: Fraction | int = 1) -> None:
    """Add `sent`, `times` times, to `total`."""
    for axes, count in sent.items():
        total[axes] += count * times


def ranks_of(axes: Iterable[str], plan: StepPlan) -> int:
    """Count the ranks along `axes`."""
    return math.prod(plan.mesh.shape[axis] for axis in axes)


def long_axes(axes: Iterable[str], plan: StepPlan) -> Axes:
    """Return those longer than 1 in the mesh's order, as `collective_traffic` names them."""
    named = set(axes)
    return tuple(axis for axis in AXES if axis in named and plan.mesh.shape[axis] > 1)
