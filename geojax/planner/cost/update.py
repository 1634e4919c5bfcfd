"""Time of the optimizer's update of a device's shard of the state.

passes     the norm reads the gradient; the update reads it again, reads and writes the weight
           and the optimizer's state, and writes the weight in the compute dtype
products   of Muon: five iterations of Newton-Schulz on each matrix that a rank is dealt
exchange   bytes of `geojax.planner.traffic.optimizer`, over the networks of the site
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax

from geojax.accelerators import Accelerator
from geojax.models import AnyModel
from geojax.optim import OptimizerSettings
from geojax.optim.algorithms.matrix_shares import matrix_groups
from geojax.optim.algorithms.muon import ITERATIONS
from geojax.optim.registry import optimizer_entry
from geojax.planner.cost.matmul import MatmulRate, matmul_rate
from geojax.planner.cost.memory import optimizer_bytes
from geojax.planner.cost.networks import SiteNetworks
from geojax.planner.cost.prediction import Network, Term
from geojax.planner.traffic.optimizer import layouts_by_optimizer, optimizer_collectives
from geojax.step.plan import StepPlan

MORE_PASSES = {"none": 0, "means": 3, "matrices": 4}
"""Further passes over the gradient, by an entry's statistics: the means of rows, those of columns
and the norm of the direction (Adafactor); whole matrices that are written and read on the way to
their ranks and back (Muon)."""


def update_terms(
    model: AnyModel,
    optimizer: OptimizerSettings,
    layouts: Any,
    plan: StepPlan,
    networks: SiteNetworks,
) -> Iterator[Term]:
    """Yield the parts of an update.

    Args:
        model: the model.
        optimizer: the optimizer of its parameters.
        layouts: the `LeafLayout` of each parameter.
        plan: the step.
        networks: of the site that computes longest.
    """
    yield _passes(model, optimizer, layouts, plan, networks)
    products = _products_seconds(model, optimizer, layouts, plan, networks)
    if products:
        yield Term(
            "Newton-Schulz",
            "FLOPs of the matrices that a rank is dealt over the peak for 32-bit factors "
            "(geojax.optim.algorithms.muon)",
            products,
            products,
        )
    exchange = _exchange(model, optimizer, layouts, plan, networks)
    if exchange is not None:
        yield exchange


def _passes(
    model: AnyModel,
    optimizer: OptimizerSettings,
    layouts: Any,
    plan: StepPlan,
    networks: SiteNetworks,
) -> Term:
    numbers = _numbers(layouts)
    moved = _bytes_of_number(model, optimizer, plan) * numbers
    for name, own in layouts_by_optimizer(model, optimizer, layouts).items():
        passes = MORE_PASSES[optimizer_entry(name).statistics]
        moved += passes * plan.policy.reduce_dtype.itemsize * _numbers(own)
    site = networks.site
    if site.shared_cores is not None:
        of_adam = _bytes_of_number(model, OptimizerSettings(), plan)
        took = moved / of_adam * site.shared_cores.update_seconds_per_number
        source = (
            "measured time of Adam's update of a number on all devices at once, by the bytes "
            "(geojax.probe.shared_cores)"
        )
    else:
        rate = site.accelerator.memory_bytes_per_second or math.inf
        took = moved / (rate * networks.calibration.memory(site.accelerator))
        source = (
            f"{moved / numbers:.3g} bytes a number of the state's shard over the memory's "
            f"bandwidth ({optimizer.name})"
        )
    return Term("optimizer", source, took, took, bytes=moved)


def _numbers(layouts: Any) -> int:
    return sum(math.prod(leaf.shard_shape) for leaf in jax.tree.leaves(layouts))


def _bytes_of_number(model: AnyModel, optimizer: OptimizerSettings, plan: StepPlan) -> float:
    """Return what an update moves for a parameter: of Adam in bf16 34 bytes."""
    dtypes = plan.policy
    gradient, master = dtypes.reduce_dtype.itemsize, dtypes.master_dtype.itemsize
    cast = 0 if dtypes.compute_dtype == dtypes.master_dtype else dtypes.compute_dtype.itemsize
    state = optimizer_bytes(model, optimizer, dtypes.master_dtype)
    return 2 * gradient + 2 * (master + state) + cast


def _products_seconds(
    model: AnyModel,
    optimizer: OptimizerSettings,
    layouts: Any,
    plan: StepPlan,
    networks: SiteNetworks,
) -> float:
    """Time the products of all matrices that the busiest rank of a site orthogonalizes.

    Of a matrix [a, b] with a <= b, an iteration has [a, b] x [b, a], [a, a] x [a, a] and
    [a, a] x [a, b].
    """
    seconds = 0.0
    for name, own in layouts_by_optimizer(model, optimizer, layouts).items():
        if optimizer_entry(name).statistics != "matrices":
            continue
        rate = _rate(plan, networks)
        for group, matrices in matrix_groups(own).items():
            dealt = group.exchanged(matrices) / group.ranks
            short, long = sorted(group.part_shape)
            sizes = ((short, short, long), (short, short, short), (short, long, short))
            one = sum(rate.seconds(*size, out_itemsize=rate.itemsize) for size in sizes)
            seconds += dealt * ITERATIONS * one
    cores = networks.site.shared_cores
    return seconds * (1 if cores is None else cores.devices_per_core)


def _rate(plan: StepPlan, networks: SiteNetworks) -> MatmulRate:
    accelerator, calibration = networks.site.accelerator, networks.calibration
    precision = _precision(accelerator, plan.policy.reduce_dtype.name)
    efficiency = calibration.matmul(accelerator, precision)
    return matmul_rate(accelerator, precision, efficiency, calibration.memory(accelerator))


def _precision(accelerator: Accelerator, dtype: str) -> str:
    """Return the precision in which an accelerator multiplies factors of `dtype` by default."""
    if dtype != "float32":
        return dtype
    by_default = ("tensorfloat32", "float32", "bfloat16")
    return next((each for each in by_default if accelerator.peak(each)), dtype)


def _exchange(
    model: AnyModel,
    optimizer: OptimizerSettings,
    layouts: Any,
    plan: StepPlan,
    networks: SiteNetworks,
) -> Term | None:
    took = total = steps = 0.0
    network: Network = "inside_host"
    collectives = sorted(optimizer_collectives(model, optimizer, layouts, plan))
    for axes, same in itertools.groupby(collectives, key=lambda each: each.axes):
        sent = [float(each.bytes) for each in same]
        group = networks.group(axes)
        took += group.seconds(sum(sent), len(sent))
        total += sum(sent)
        steps += len(sent) * group.steps
        if group.network == "between_hosts":
            network = group.network
    if not total:
        return None
    return Term(
        "optimizer in the site",
        "predicted bytes over the network's bandwidth, and the steps of its rings "
        "(geojax.planner.traffic.optimizer)",
        took,
        took,
        bytes=total,
        messages=steps,
        network=network,
    )
