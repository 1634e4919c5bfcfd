"""Predicted bytes of the statistics that an optimizer needs of other shards, all inside a site.

    Muon       whole matrices: of M matrices of S bytes that n ranks hold pieces of, each sends
               2 (n - 1) / n of the S M / n bytes of its pieces, M rounded up to a multiple of n,
               for each of ZeRO's and the model's cuts of a matrix
               (`geojax.optim.algorithms.matrix_shares`)
    Adafactor  of each matrix a sum for the means of its rows, one for those of its columns, one
               for the mean of all and one for the norm of its direction; of a scale or bias the
               last (`geojax.optim.algorithms.adafactor`)

The others need none beyond the norm of the gradient, which all of them share.
"""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from geojax.hlo.conventions import all_reduce_bytes, all_to_all_bytes
from geojax.models import AnyModel, parameter_kinds
from geojax.models.declaration import KindOf
from geojax.named_arrays import leaves_by_name
from geojax.optim import OptimizerSettings
from geojax.optim.algorithms.adafactor import summed_axes
from geojax.optim.algorithms.matrix_shares import matrix_groups
from geojax.optim.registry import optimizer_entry
from geojax.planner.traffic.by_axes import Axes, long_axes, ranks_of
from geojax.sharding import LeafLayout
from geojax.step.plan import StepPlan


class OptimizerCollective(NamedTuple):
    """One collective of an update."""

    axes: Axes
    bytes: Fraction
    """Bytes that one device sends."""


def optimizer_collectives(
    model: AnyModel, optimizer: OptimizerSettings, layouts: Any, plan: StepPlan
) -> Iterator[OptimizerCollective]:
    """Yield the collectives of an update.

    Args:
        model: the model.
        optimizer: the optimizer.
        layouts: the `LeafLayout` of each parameter.
        plan: how the step runs.
    """
    for name, own in layouts_by_optimizer(model, optimizer, layouts).items():
        match optimizer_entry(name).statistics:
            case "matrices":
                yield from _of_matrices(own, plan)
            case "means":
                yield from _of_means(own, plan, parameter_kinds(model))


def layouts_by_optimizer(
    model: AnyModel, optimizer: OptimizerSettings, layouts: Any
) -> Mapping[str, Mapping[str, LeafLayout]]:
    """Divide the parameters, by their names, among the optimizers that update them."""
    leaves, kind_of = leaves_by_name(layouts), parameter_kinds(model)
    return {
        name: {
            leaf: place
            for leaf, place in leaves.items()
            if optimizer.of_leaf(leaf, kind_of(leaf)).optimizer == name
        }
        for name in sorted(optimizer.optimizers)
    }


def _of_matrices(
    layouts: Mapping[str, LeafLayout], plan: StepPlan
) -> Iterator[OptimizerCollective]:
    for group, matrices in matrix_groups(layouts).items():
        numbers = group.exchanged(matrices) * math.prod(group.part_shape) // group.ranks
        payload = numbers * plan.policy.reduce_dtype.itemsize
        for cut in group.cuts:
            sent = all_to_all_bytes(payload, cut.ranks)
            yield from [OptimizerCollective(long_axes(cut.axes, plan), sent)] * 2


def _of_means(
    layouts: Mapping[str, LeafLayout], plan: StepPlan, kind_of: KindOf
) -> Iterator[OptimizerCollective]:
    for name, layout in layouts.items():
        *stack, rows, columns = (1, *layout.shard_shape)
        count = math.prod(stack)
        sums: list[tuple[tuple[int, ...], int]] = [((-1,), count * rows)]
        if kind_of(name) != "vector":
            sums += [((-2,), count * columns), ((-2,), count), ((-2, -1), count)]
        for dims, numbers in sums:
            axes = summed_axes(layout, dims)
            payload = numbers * plan.policy.reduce_dtype.itemsize
            sent = all_reduce_bytes(payload, ranks_of(axes, plan))
            yield OptimizerCollective(long_axes(axes, plan), sent)
