"""Dimensions of the search, and the reason for each that a request leaves out."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from geojax.planner.search.request import PlanRequest
from geojax.planner.search.space import LONG_SEQUENCE
from geojax.planner.search.variations import can_shard_across_sites


def _searched(_: PlanRequest) -> str | None:
    return None


def _always(reason: str) -> Callable[[PlanRequest], str]:
    return lambda _: reason


def _if_several(option: str, why: str) -> Callable[[PlanRequest], str | None]:
    """Return the reason of a choice that the user opens: only one is open."""

    def reason(request: PlanRequest) -> str | None:
        choices = getattr(request, option)
        return f"{choices[0]} alone, {why}" if len(choices) == 1 else None

    return reason


def _between_sites(
    reason: Callable[[PlanRequest], str | None],
) -> Callable[[PlanRequest], str | None]:
    """Return the reason of a choice that one site does not have."""
    return lambda request: reason(request) if request.sites > 1 else None


def _across_sites(request: PlanRequest) -> str | None:
    if "data" not in request.roles or "one_program" not in request.joins:
        return "for replicas in one program"
    if not can_shard_across_sites(request):
        return "for gradients without compression, and optimizers that work element by element"
    return None


def _context(request: PlanRequest) -> str | None:
    if request.sequence_length > LONG_SEQUENCE:
        return None
    return f"for sequences of more than {LONG_SEQUENCE:,} tokens"


class Dimension(NamedTuple):
    """One thing that a layout chooses."""

    name: str
    fields: tuple[str, ...]
    """Settings of a layout that say it, by dotted key; and `site_shares`."""
    left_out: Callable[[PlanRequest], str | None] = _searched
    """Returns the reason why a request has it not searched; None: it is, or there is none."""


_NUMERICS = "since others change numerics"

DIMENSIONS = (
    Dimension("join", ("dc.join",), _between_sites(_if_several("joins", "of --joins"))),
    Dimension("role", ("dc.role",), _between_sites(_if_several("roles", "of --roles"))),
    Dimension("stages", ("mesh.stage",)),
    Dimension("virtual stages", ("pipeline.virtual_stages",)),
    Dimension("layers of a chunk", ("pipeline.layers",)),
    Dimension("tensor", ("mesh.tensor",)),
    Dimension(
        "parts of the stream",
        ("parallelism.chunks",),
        _always("by the time of a layer, as a run does"),
    ),
    Dimension(
        "stages of the head",
        ("pipeline.head",),
        _always("by the time of the busiest stage, as a run does"),
    ),
    Dimension("context", ("mesh.context", "parallelism.context_method"), _context),
    Dimension("expert", ("mesh.expert",)),
    Dimension("data", ("mesh.data",)),
    Dimension("ZeRO stage", ("zero.stage", "zero.reshard_after_forward")),
    Dimension("sharding across sites", ("zero.across_sites",), _between_sites(_across_sites)),
    Dimension("microbatches", ("batch.microbatches",)),
    Dimension("remat", ("remat",), _if_several("remats", "that of the measured times")),
    Dimension(
        "loops over layers", ("scan_layers",), _always("by platform and size, as a run does")
    ),
    Dimension("schedule", ("pipeline.schedule",)),
    Dimension("memory limit", ("pipeline.memory_limit",)),
    Dimension(
        "buckets",
        (
            "communication.bucket_bytes",
            "communication.bucket_layers",
            "communication.overlap_grad_reduce",
            "communication.overlap_scatter",
        ),
    ),
    Dimension(
        "gathers beside compute",
        ("communication.overlap_param_gather",),
        _always("where there are several chunks, as a run does"),
    ),
    Dimension(
        "compression",
        ("communication.gradient_compression",),
        _between_sites(_if_several("compressions", _NUMERICS)),
    ),
    Dimension("precision", ("precision",), _if_several("precisions", _NUMERICS)),
    Dimension(
        "memory limit in bytes",
        ("pipeline.memory_limit_bytes",),
        _always("the most microbatches that fit are"),
    ),
    Dimension(
        "hop ticks", ("pipeline.hop_ticks",), _always("as a run takes one or two by the link")
    ),
    Dimension(
        "sequence parallelism",
        ("parallelism.sequence",),
        _always("on with tensor wherever it can be: no slower, in less memory"),
    ),
    Dimension("sites", ("mesh.dc", "site_shares"), _always("all of the topology, by their speeds")),
)
"""Everything that a layout chooses."""


def not_searched(request: PlanRequest) -> Iterator[str]:
    """Yield a phrase for each dimension that the search of a request leaves out."""
    for dimension in DIMENSIONS:
        reason = dimension.left_out(request)
        if reason is not None:
            yield f"{dimension.name} ({reason})"
