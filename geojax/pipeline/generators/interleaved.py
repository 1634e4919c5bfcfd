"""Several chunks a stage, dealt out in turn: a smaller bubble for more messages."""

import itertools
from collections.abc import Sequence

from geojax.errors import UserError
from geojax.pipeline.schedule import Action, Kind, Placement, Schedule


def interleaved(
    stages_per_site: Sequence[int], chunks_per_stage: int, microbatches: int
) -> Schedule:
    """Interleaved 1F1B, with virtual stages that stay inside their site.

    Stages take microbatches in groups as large as the largest site: the group's forwards through
    the stage's first chunk, through its second, and so on; backwards the same from the last chunk
    to the first. With one site this is Megatron's schedule (Narayanan et al., 2021, section 2.2.2).
    A stage runs ahead by Megatron's warm-up in its own site, and by one microbatch, all its chunks,
    for each stage in the sites behind.

    Raises:
        UserError: the microbatches are not a multiple of the group.
    """
    group = max(stages_per_site)
    warmups = []
    for site, count in enumerate(stages_per_site):
        behind = sum(stages_per_site[site + 1 :]) * chunks_per_stage
        ahead = (chunks_per_stage - 1) * group
        warmups += [ahead + 2 * (count - 1 - stage) + behind for stage in range(count)]
    if microbatches % group:
        raise UserError(
            f"{microbatches} microbatches cannot be interleaved in groups of {group}, the stages "
            f"of a site: take a multiple of {group}"
        )
    placement = Placement.interleaved(stages_per_site, chunks_per_stage)
    return with_groups(placement, microbatches, group, warmups)


def with_groups(
    placement: Placement, microbatches: int, group: int, warmups: Sequence[int]
) -> Schedule:
    """The orders of `interleaved` for any size of a group and any number of first forwards.

    `warmups` counts, for each stage, the chunks' forwards that come before the first pair of a
    forward and a backward. The microbatches are a multiple of the group.
    """
    assert microbatches % group == 0, "groups are whole"
    orders = []
    for stage, warmup in enumerate(warmups):
        chunks = placement.chunks_of(stage)
        forwards = _in_groups(Kind.FORWARD, chunks, microbatches, group)
        backwards = _in_groups(Kind.BACKWARD, chunks[::-1], microbatches, group)
        first = min(warmup, len(forwards))
        pairs = zip(forwards[first:], backwards, strict=False)
        orders.append(
            (
                *forwards[:first],
                *itertools.chain.from_iterable(pairs),
                *backwards[len(forwards) - first :],
            )
        )
    return Schedule("interleaved", placement, microbatches, False, tuple(orders))


def _in_groups(kind: Kind, chunks: Sequence[int], microbatches: int, group: int) -> list[Action]:
    return [
        Action(kind, i, chunk)
        for start in range(0, microbatches, group)
        for chunk in chunks
        for i in range(start, start + group)
    ]
