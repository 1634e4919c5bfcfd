"""Bytes that a device sends, by the mesh axes that they cross."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from geojax.mesh import AXES
from geojax.models import ModelConfig
from geojax.pipeline.schedule import Kind
from geojax.step.plan import StepPlan

Axes = tuple[str, ...]
BytesByAxes = collections.defaultdict[Axes, Fraction]
"""The bytes that a device sends, by the axes, longer than 1, of the collectives."""


@dataclasses.dataclass(frozen=True)
class PredictedTraffic:
    """The bytes that devices send in one step, by formula."""

    by_axes: Mapping[Axes, Fraction]
    """The bytes that one device sends, by the axes that they cross, as `collective_traffic` names
    them; over hops, a device of a stage that has a next one."""
    total_by_axes: Mapping[Axes, Fraction]
    """The bytes that all devices send together, by the same axes."""

    def bytes_over(self, axis: str) -> Fraction:
        """Sum the bytes of one device that cross `axis`, alone or together with others."""
        return sum((sent for axes, sent in self.by_axes.items() if axis in axes), Fraction(0))

    def total_bytes_over(self, axis: str) -> Fraction:
        """Sum the bytes of all devices that cross `axis`, alone or together with others."""
        return sum((sent for axes, sent in self.total_by_axes.items() if axis in axes), Fraction(0))


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


def passes_of(plan: StepPlan) -> int:
    """Count the forward (and as many backward) passes of a step.

    There is one a microbatch; in a pipeline one a tick of the loops that hold a forward.
    """
    if plan.tick_program is None:
        return plan.layout.batch.microbatches
    counts = {
        kind: sum(
            kind in form.kinds
            for segment in plan.tick_program.segments
            for _, form in segment.ticks()
        )
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    assert len(set(counts.values())) == 1, "as many ticks must hold a backward as a forward"
    return counts[Kind.FORWARD]


def layers_of_pass(model: ModelConfig, plan: StepPlan) -> int:
    """Count the layers of a pass: the model's; in a pipeline those of the longest chunk."""
    staged = plan.staged_layers
    return staged.max_layers_per_chunk if staged else model.num_stacked_layers
