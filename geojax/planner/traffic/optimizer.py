"""Predicted bytes of the statistics that an optimizer needs of other shards, all inside a site.

    Muon    whole matrices: of M matrices of S bytes that n ranks hold pieces of, each rank sends
            2 (n - 1) / n of the S M / n bytes of its pieces, M rounded up to a multiple of n, for
            each of ZeRO's and the model's cuts of a matrix (`geojax.optim.matrix_shares`)

AdamW, Lion and SGD need none beyond the norm of the gradient, which all of them share.
"""

import math
from typing import Any

import jax

from geojax.hlo.conventions import all_to_all_bytes
from geojax.named_arrays import leaf_name
from geojax.optim import OptimizerSettings
from geojax.optim.matrix_shares import matrix_groups
from geojax.optim.registry import optimizer_entry
from geojax.planner.traffic.by_axes import BytesByAxes, long_axes, no_bytes
from geojax.step.plan import StepPlan


def predicted_optimizer_bytes(
    optimizer: OptimizerSettings, layouts: Any, plan: StepPlan
) -> BytesByAxes:
    """Predict the bytes that one device sends in one step for its optimizer.

    Args:
        optimizer: the optimizer.
        layouts: the `LeafLayout` of each parameter.
        plan: how the step runs.
    """
    sent = no_bytes()
    for name in sorted(optimizer.optimizers):
        own = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(layouts)
            if optimizer.of_leaf(leaf_name(path)).optimizer == name
        ]
        if optimizer_entry(name).statistics == "matrices":
            _add_matrices(sent, own, plan)
    return sent


def _add_matrices(sent: BytesByAxes, layouts: Any, plan: StepPlan) -> None:
    for group, matrices in matrix_groups(layouts).items():
        numbers = group.exchanged(matrices) * math.prod(group.part_shape) // group.ranks
        payload = numbers * plan.policy.reduce_dtype.itemsize
        for cut in group.cuts:
            sent[long_axes(cut.axes, plan)] += 2 * all_to_all_bytes(payload, cut.ranks)
