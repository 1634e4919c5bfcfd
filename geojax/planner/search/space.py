"""Enumeration of the layouts that use every accelerator of a topology, before memory is counted.

A mesh must divide the accelerators of a site, heads and widths of the model, its layers, and the
global batch. A group of `tensor` stays inside a host: its collectives are in every layer, and
between hosts they take longer than the products between them. Each layout that cannot be is
counted by the constraint that refuses it.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from geojax.errors import UserError
from geojax.layout_names import DcRole, Join, WireName
from geojax.models import ModelConfig
from geojax.models.parallel.limits import check_parallelism
from geojax.models.parallel.parallelism import ContextMethod, Parallelism
from geojax.pipeline.registry import schedule_entry
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.search.proportions import of_sites, with_batch
from geojax.planner.search.request import PlanRequest

MOST_SCHEDULED = 2**14
"""Most (microbatch, chunk) pairs of a schedule that a search looks at; longer tables take seconds
each to make."""

MICROBATCH_SIZES = (1, 2, 4, 8)
"""Sequences of a microbatch that are tried: more only hold more."""

MOST_CONTEXT = 16
"""Most ranks of `context` that are tried."""

LONG_SEQUENCE = 8192
"""Tokens of a sequence up to which `context` is not tried: a device has room for one."""

SCHEDULES = ("branch_free", "1f1b", "zero_bubble_h1", "interleaved", "zbv")
"""Schedules that are tried where there are pipeline stages."""

EVENT_SCHEDULES = ("1f1b", "geopipe", "zero_bubble_h1", "interleaved", "zbv")
"""The same for islands, whose stages begin an action as soon as its input is there."""


COMPRESSIONS: tuple[WireName, ...] = ("none", "bf16", "int8")
"""Formats of gradients on the link, those of fewer bytes later."""


class Order(NamedTuple):
    """One way to run a pipeline, by the settings of a config."""

    schedule: str
    virtual_stages: int = 1
    memory_limit: int | None = None


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def shapes(request: PlanRequest, refused: Counter[str]) -> Iterator[LayoutCandidate]:
    """Yield every mesh with its microbatches, schedules and precisions, without remat.

    Args:
        request: what is asked for.
        refused: counts the meshes that cannot be, by the constraint that refuses them.
    """
    for mesh in meshes(request, refused):
        if with_batch(mesh, request.global_batch_size, 1) is None:
            refused["batch"] += 1
            continue
        for size in MICROBATCH_SIZES:
            sized = with_batch(mesh, request.global_batch_size, size)
            if sized is None:
                continue
            found = orders(sized, request.model.num_stacked_layers)
            for order, precision in itertools.product(found, request.precisions):
                yield sized.changed(precision=precision, pipeline=order._asdict())


def meshes(request: PlanRequest, refused: Counter[str]) -> Iterator[LayoutCandidate]:
    """Yield every mesh on the accelerators of the request that the model can be sharded over.

    Gradients are compressed as far as they may be; the search varies that of the fastest.

    Args:
        request: what is asked for.
        refused: counts the meshes that cannot be, by the constraint that refuses them.
    """
    model, common = request.model, request.common_accelerators
    start = _start(request)
    parts = [site.accelerators // common for site in request.topology.sites]
    unlike = request.has_unlike_accelerators
    shortest = max(request.compressions, key=COMPRESSIONS.index)
    experts = divisors(model.num_experts or 1) if isinstance(model, ModelConfig) else [1]
    of_model = itertools.product(
        divisors(request.common_accelerators_per_host), _context_sizes(request), experts
    )
    for tensor, context, expert in of_model:
        shared = tensor * context * expert
        if common % shared:
            refused["accelerators of a site"] += 1
            continue
        sequence = _shards_sequence(request, tensor, context, expert)
        if sequence is None:
            refused["sizes of the model"] += 1
            continue
        stages_of_site = divisors(common // shared)
        for stages, (role, join) in itertools.product(stages_of_site, _ways_to_join(request)):
            total = stages * (sum(parts) if role == "stage" else 1)
            if total > model.num_stacked_layers:
                refused["layers"] += 1
                continue
            if join == "islands" and role == "data" and stages > 1:
                continue  # such a site has no stages inside
            if join == "islands" and model.num_nextn_predict_layers:
                refused["modules for later tokens"] += 1
                continue
            mesh = {"stage": stages, "data": common // (shared * stages)}
            layout = start.changed(
                mesh=mesh | {"expert": expert, "context": context, "tensor": tensor},
                parallelism={"sequence": sequence},
                dc={"role": role, "join": join},
                communication={"gradient_compression": shortest if role == "data" else "none"},
            )
            yield from of_sites(layout, parts, unlike=unlike)


def _start(request: PlanRequest) -> LayoutCandidate:
    """Return the layout of which the others differ: with what is alike in all, and defaults."""
    return LayoutCandidate.made(
        sequence_length=request.sequence_length,
        mesh={"dc": request.sites},
        parallelism={"context_method": _context_method(request)},
    )


def orders(layout: LayoutCandidate, layers: int) -> list[Order]:
    """List the ways to run the pipeline of a mesh with its microbatches.

    Args:
        layout: the mesh and its microbatches.
        layers: layers of the model.
    """
    stages, microbatches = layout.pipeline_stages, layout.batch.microbatches
    if stages == 1:
        return [Order("branch_free")]
    ring = max(layout.stages_per_site)
    found = []
    for name in SCHEDULES if layout.dc.join == "one_program" else EVENT_SCHEDULES:
        fixed = schedule_entry(name).virtual_stages
        for virtual in [fixed] if fixed else divisors(layers):
            chunks = stages * virtual
            if chunks > layers or chunks * microbatches > MOST_SCHEDULED:
                continue
            if name == "interleaved" and (virtual == 1 or microbatches < ring):
                continue
            # In ticks of both kinds 1f1b is branch_free; with a limit it holds half as much.
            found.append(Order(name, virtual, stages if name == "1f1b" else None))
    return found


def _ways_to_join(request: PlanRequest) -> list[tuple[DcRole, Join]]:
    if request.sites == 1:
        return [("data", "one_program")]
    return [(role, join) for role in request.roles for join in request.joins]


def _context_sizes(request: PlanRequest) -> list[int]:
    if request.sequence_length <= LONG_SEQUENCE:
        return [1]
    return [n for n in divisors(request.common_accelerators) if n <= MOST_CONTEXT]


def _context_method(request: PlanRequest) -> ContextMethod:
    """Return the method for long sequences: a ring, unless windows leave most of it unseen."""
    model = request.model
    has_window = isinstance(model, ModelConfig) and model.sliding_window is not None
    return "all_gather" if has_window else "ring"


def _shards_sequence(request: PlanRequest, tensor: int, context: int, expert: int) -> bool | None:
    """Return if ranks of `tensor` shard the sequence as well; None: the model cannot be sharded."""
    for sequence in (True, False) if tensor > 1 else (False,):
        parallelism = Parallelism(
            tensor=tensor,
            sequence=sequence,
            context=context,
            context_method=_context_method(request),
            expert=expert,
        )
        with contextlib.suppress(UserError):
            check_parallelism(request.model, parallelism, request.sequence_length)
            return sequence
    return None
