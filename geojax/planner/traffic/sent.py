"""Bytes that a device sends, by the mesh axes that they cross: the sums of `expected_traffic`."""

import collections
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from geojax.mesh import AXES
from geojax.models import ModelConfig
from geojax.pipeline.schedule import Kind
from geojax.step.plan import StepPlan

Axes = tuple[str, ...]
Sent = collections.defaultdict[Axes, Fraction]
"""Bytes that a device sends by the axes, longer than 1, of the collectives."""


def nothing() -> Sent:
    """No bytes yet."""
    return collections.defaultdict(Fraction)


def add(total: Sent, sent: Mapping[Axes, Fraction], times: Fraction | int = 1) -> None:
    """`sent`, so many times, into `total`."""
    for axes, count in sent.items():
        total[axes] += count * times


def ranks_of(axes: Iterable[str], plan: StepPlan) -> int:
    """The number of ranks along `axes`."""
    return math.prod(plan.mesh.shape[axis] for axis in axes)


def long_axes(axes: Iterable[str], plan: StepPlan) -> Axes:
    """Those longer than 1 in the mesh's order, as `collective_traffic` names them."""
    named = set(axes)
    return tuple(axis for axis in AXES if axis in named and plan.mesh.shape[axis] > 1)


def passes_of(plan: StepPlan) -> int:
    """How often a step runs the layers of a pass, forwards and backwards: once a microbatch; in a
    pipeline once a tick of the loops that hold a forward, and as many hold a backward."""
    if plan.tick_program is None:
        return plan.accumulation
    counts = {
        kind: sum(each.count for each in plan.tick_program.segments if kind in each.kinds)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    assert len(set(counts.values())) == 1, "a hop takes as many ticks back as there"
    return counts[Kind.FORWARD]


def layers_of_pass(model: ModelConfig, plan: StepPlan) -> int:
    """The layers of a pass: the model's; in a pipeline those of the longest chunk."""
    return plan.staged_layers.rows_per_chunk if plan.staged_layers else model.num_hidden_layers
