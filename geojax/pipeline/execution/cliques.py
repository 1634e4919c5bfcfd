"""The cliques of devices that NCCL makes for the messages between stages."""

from collections.abc import Iterable

from geojax.pipeline.execution.tick_program import Channel

Groups = frozenset[frozenset[int]]


def cliques_agree(channels: Iterable[Channel], stages: int) -> bool:
    """Return True if XLA can make a clique of each chain of stages that send to each other.

    With `xla_gpu_collective_permute_connected_components` a stage that neither sends nor receives
    in a channel is a clique of its own. XLA refuses to run a program (some versions wait for ever,
    openxla/xla#44530) in which channels have one of their cliques in common, but not all:

        {0 1} {2 3} and {0} {1 2} {3}      hops of one tick, and of two between the stages 1 and 2
        {0 1 2} {3} and {0} {1 2} {3}      refused: both have {3}
    """
    groups_of: dict[frozenset[int], Groups] = {}
    for channel in channels:
        groups = _connected(channel.pairs, stages)
        if any(groups_of.setdefault(group, groups) != groups for group in groups):
            return False
    return True


def _connected(pairs: Iterable[tuple[int, int]], stages: int) -> Groups:
    groups = {stage: frozenset((stage,)) for stage in range(stages)}
    for pair in pairs:
        joined = groups[pair[0]] | groups[pair[1]]
        groups |= dict.fromkeys(joined, joined)
    return frozenset(groups.values())
