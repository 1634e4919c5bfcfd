"""Collectives of a compiled program whose order XLA's CPU runtime does not fix.

It issues the collectives of one computation in the order of the schedule, the same on every device.
But a loop or a conditional counts as issued before all collectives in it are, so that a later one
which does not need its result can come between them on one device and not on the next.
"""

import functools
import itertools

from geojax.hlo.module import Computation, Instruction, parse_module

_COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
_NESTED = {"while", "conditional", "call"}


def unordered_collectives(text: str) -> list[tuple[str, str]]:
    """Each loop or conditional with collectives, and one that may come between them, by name.

    The text is that of a scheduled program, whose computations list what comes first first.
    """
    module = parse_module(text)

    @functools.cache
    def communicates(name: str) -> bool:
        return any(sends(each) for each in module.computations[name])

    def sends(each: Instruction) -> bool:
        if each.opcode in _NESTED:
            return any(communicates(name) for name in each.calls)
        return each.opcode in _COLLECTIVES

    found = []
    for computation in module.computations.values():
        sending = [each for each in computation if sends(each)]
        if not any(each.opcode in _NESTED for each in sending):
            continue
        needed = _needed(computation)
        found += [
            (first.name, second.name)
            for first, second in itertools.combinations(sending, 2)
            if first.opcode in _NESTED and first.name not in needed[second.name]
        ]
    return found


def _needed(computation: Computation) -> dict[str, frozenset[str]]:
    """All that each instruction waits for."""
    needed: dict[str, frozenset[str]] = {}
    for each in computation:
        operands = [name for name in each.operands if name in needed]
        needed[each.name] = frozenset(operands).union(*(needed[name] for name in operands))
    return needed
