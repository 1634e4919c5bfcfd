"""The lists of actions of sites with runtimes of their own, and the messages that they offer."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from geojax.config.run_config import RunConfig
from geojax.islands.actions import (
    Receive,
    Send,
    Shares,
    SiteAction,
    breadth_first,
    data_actions,
    fetched_ahead,
    forward_actions,
    own_shares,
    stage_actions,
    windows,
)
from geojax.islands.programs.site_programs import SitePrograms
from geojax.models.transformer import tables_of_head
from geojax.pipeline.schedule import Action, Placement, Schedule
from geojax.step.resolved import IslandWork, Step

Lists = Sequence[Sequence[SiteAction]]
"""The actions of each stage; in role data, and with one stage a site, a stage is a site."""

_STEPS_IN_FLIGHT = 2
_SCALARS_BYTES = 1 << 20


def action_lists(config: RunConfig, step: Step, shares: Shares | None = None) -> Lists:
    """List the actions of each stage of all sites in a step.

    Args:
        config: the run of all sites.
        step: its choices.
        shares: the shares of the batch that each site computes, in role data; None: its own.
    """
    if step.sites:
        shares, microbatches = shares or own_shares(config.mesh.dc), config.batch.microbatches
        return [data_lists(own, shares, microbatches)[n] for n, own in enumerate(step.sites)]
    assert step.pipeline is not None, "sites in role stage are stages of a pipeline"
    return stage_lists(config, step.pipeline.as_schedule)


@functools.lru_cache(maxsize=64)  # a step waits for the lists of shares that are new
def data_lists(work: IslandWork, shares: Shares, microbatches: int) -> Lists:
    """List the actions of each site in role data, where all sites have the same work a share."""
    order = breadth_first(len(work.layers), microbatches, work.held_microbatches)
    return tuple(data_actions(order, site, shares) for site in range(len(shares)))


def stage_lists(config: RunConfig, schedule: Schedule) -> Lists:
    """List the actions of each stage in role stage, in the order of a schedule."""
    tied, count = config.model.head_reads_tokens, config.mesh.stage
    return [
        stage_actions(schedule, stage, tied=tied, stages_per_site=count)
        for stage in range(config.pipeline_stages)
    ]


def validation_lists(placement: Placement, microbatches: int) -> Lists:
    """List the actions of each stage in a validation."""
    return [forward_actions(placement, microbatches, stage) for stage in range(placement.stages)]


def data_schedule(actions: Sequence[SiteAction]) -> Schedule:
    """Return the schedule of a site in role data: it is the only stage."""
    work = tuple(action for action in actions if isinstance(action, Action))
    chunks, microbatches = (1 + max(each) for each in list(zip(*work, strict=True))[:0:-1])
    return Schedule("breadth_first", Placement(1, (0,) * chunks), microbatches, False, (work,))


def hops_held(lists: Lists, stage: int) -> int:
    """Return the most messages that a stage holds of hops to and from the others."""
    hops = _hops(lists)
    receivers = {action.site for action in lists[stage] if isinstance(action, Send)}
    offered = sum(fetched_ahead(hops, receiver)[stage] for receiver in receivers)
    return offered + sum(fetched_ahead(hops, stage).values())


def offered_at_once(lists: Lists, stages_per_process: int = 1) -> int:
    """Return the most hops that a process has offered to another one that has not taken them.

    Args:
        lists: the actions of each stage.
        stages_per_process: stages that a process holds a part of; 1: at most one.
    """
    offered: Counter[tuple[int, int]] = Counter()
    for (sender, receiver), count in windows(_hops(lists)).items():
        offered[sender // stages_per_process, receiver // stages_per_process] += count
    return max(count for (sender, receiver), count in offered.items() if sender != receiver)


def _hops(lists: Lists) -> Lists:
    """Return the lists without sums and updates."""
    return [[each for each in own if isinstance(each, Action | Receive | Send)] for own in lists]


def offer_limit_bytes(
    config: RunConfig, lists: Lists, programs: SitePrograms, stages_per_process: int = 1
) -> int:
    """Return the bytes that a device may have offered to one other site, or stage, at a time.

    In role data these are the gradients of two steps, of all shares of the batch that a site may
    come to compute. In role stage they are the messages that the schedule has under way to a stage,
    and a tied table's gradient.

    Args:
        config: the run of all sites.
        lists: the actions of each stage.
        programs: of a site in role data, or of the first stage.
        stages_per_process: stages whose messages to those of another process count together.
    """
    parameters = programs.layouts.parameters
    if config.dc.role == "data":
        shares = programs.plan.most_shares
        return _STEPS_IN_FLIGHT * shares * _shard_bytes(parameters) + _SCALARS_BYTES
    hops = offered_at_once(lists, stages_per_process) * programs.hop_bytes
    table = 0
    if config.model.head_reads_tokens:
        table = _shard_bytes(tables_of_head(parameters["embedding"], config.model))
    return hops + table + _SCALARS_BYTES


def _shard_bytes(layouts: Any) -> int:
    leaves = jax.tree.leaves(layouts)
    return sum(math.prod(leaf.shard_shape) * leaf.dtype.itemsize for leaf in leaves)
