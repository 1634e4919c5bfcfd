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
    A stage begins its backwards when the first one would reach it if every stage ran a forward and
    a backward at a time. With more sites a microbatch goes through all chunks of one before it
    crosses to the next, so that stages hold more and only the bubble inside the sites shrinks.

    Raises:
        UserError: the microbatches are not a multiple of the group.
    """
    group = max(stages_per_site)
    if microbatches % group:
        raise UserError(
            f"{microbatches} microbatches cannot be interleaved in groups of {group}, the stages "
            f"of a site: take a multiple of {group}"
        )
    placement = Placement.interleaved(stages_per_site, chunks_per_stage)
    warmups = warmups_in_ticks(
        stages_per_site, chunks_per_stage, group, (1,) * (placement.chunks - 1)
    )
    return with_groups(placement, microbatches, group, warmups)


def warmups_in_ticks(
    stages_per_site: Sequence[int],
    chunks_per_stage: int,
    group: int,
    hop_ticks: Sequence[int],
) -> list[int]:
    """For each stage the ticks from its first forward to its first backward.

    All stages run a chunk's forward and a chunk's backward a tick without a gap; `hop_ticks` has
    one entry for each chunk and its successor.
    """
    # From a microbatch's first chunk on a stage to its last.
    again = (chunks_per_stage - 1) * group
    warmups: list[int] = []
    behind = 0  # from a microbatch's last forward in a site to its first backward there
    first = sum(stages_per_site) * chunks_per_stage  # chunk of the site behind
    for count in reversed(stages_per_site):
        first -= count * chunks_per_stage
        through = sum(hop_ticks[first : first + count - 1])
        to_last = [through - sum(hop_ticks[first : first + stage]) for stage in range(count)]
        warmups = [again + 2 * ticks + behind for ticks in to_last] + warmups
        if first:
            behind += 2 * (hop_ticks[first - 1] + through + again)
    return warmups


def with_groups(
    placement: Placement, microbatches: int, group: int, warmups: Sequence[int]
) -> Schedule:
    """Make the orders of `interleaved` for any group and any number of first forwards.

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
