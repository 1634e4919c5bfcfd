"""Few combinations of many factors that hold every pair of values of two factors."""

import functools
import itertools
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Factors: TypeAlias = Mapping[str, Sequence[Any]]
"""The values of each factor, the simplest first."""

Combination: TypeAlias = dict[str, Any]

ALONE = object()
"""The kind of values that need not meet others."""

_CANDIDATES = 100
"""Combinations that hold a pair: the best is taken, and if none is found, the pair cannot be."""

_ROUNDS = 600
"""Times that a part of the chosen combinations is chosen anew."""

_CHANGES = 150
"""Values that are drawn anew in a combination that does not exist, before it is given up."""


def pairwise(
    factors: Factors,
    exists: Callable[[Combination], bool],
    kind_of: Callable[[str, Any], Any] = lambda name, value: value,
) -> list[Combination]:
    """Combinations that hold every value, and every pair of kinds of them, that can occur.

    Greedy: of the combinations drawn for the first pair that is missing, the one that brings most.

    Args:
        factors: the values of each.
        exists: tells combinations that exist from others.
        kind_of: the kind of a factor's value; `ALONE` for all values of a factor that pairs with
            no other. Without it each value is a kind.
    """
    generator = random.Random(0)
    missing = _wanted(factors, kind_of)
    chosen = []
    while missing:
        mark, held = next(iter(missing.items()))
        drawn = [
            drawn_around(generator.choice(held), factors, exists, generator)
            for _ in range(_CANDIDATES)
        ]
        existing = [each for each in drawn if each is not None]
        if not existing:
            del missing[mark]
            continue
        best = max(existing, key=lambda each: len(missing.keys() & marks(each, kind_of)))
        chosen.append(best)
        for found in marks(best, kind_of):
            missing.pop(found, None)
    return chosen


def cheapest_pairwise(
    factors: Factors,
    exists: Callable[[Combination], bool],
    kind_of: Callable[[str, Any], Any],
    cost_of: Callable[[Combination], float],
) -> list[Combination]:
    """Combinations as of `pairwise` that cost little together; a minute.

    Of many combinations that hold something wanted, those that bring most for their cost are taken.
    Then again and again a few are dropped, and what they held is covered anew.
    """
    generator = random.Random(0)
    drawn = [
        drawn_around(generator.choice(held), factors, exists, generator)
        for held in _wanted(factors, kind_of).values()
        for _ in range(_CANDIDATES)
    ]
    pool = [each for each in drawn if each is not None]
    costs = [cost_of(each) for each in pool]
    # Sets of marks as bits, of which thousands are counted in milliseconds.
    numbers: dict[Any, int] = {}
    bits = [
        sum(1 << numbers.setdefault(mark, len(numbers)) for mark in marks(each, kind_of))
        for each in pool
    ]
    everything = (1 << len(numbers)) - 1

    def held_by(chosen: list[int]) -> int:
        return functools.reduce(operator.or_, (bits[each] for each in chosen), 0)

    def completed(chosen: list[int]) -> list[int]:
        while missing := everything & ~held_by(chosen):
            shaken = generator.uniform(0.0, 1.0)  # between most for the cost, and most
            chosen = [
                *chosen,
                max(
                    range(len(pool)),
                    key=lambda each: (bits[each] & missing).bit_count() / costs[each] ** shaken,
                ),
            ]
        for each in sorted(chosen, key=costs.__getitem__, reverse=True):
            others = [other for other in chosen if other != each]
            if held_by(others) == everything:
                chosen = others
        return chosen

    best = completed([])
    for _ in range(_ROUNDS):
        kept = generator.sample(best, max(0, len(best) - generator.randint(2, 8)))
        found = completed(kept)
        if sum(map(costs.__getitem__, found)) <= sum(map(costs.__getitem__, best)):
            best = found
    return [pool[each] for each in best]


def _wanted(factors: Factors, kind_of: Callable[[str, Any], Any]) -> dict[Any, list[Combination]]:
    """What combinations must hold, and some values that have it: several values are of a kind."""
    single = [{name: value} for name, values in factors.items() for value in values]
    double = [
        {one: value, other: another}
        for (one, values), (other, others) in itertools.combinations(factors.items(), 2)
        for value, another in itertools.product(values, others)
    ]
    wanted: dict[Any, list[Combination]] = {}
    for held in (*double, *single):
        for mark in marks(held, kind_of):
            if len(mark) == len(held):
                wanted.setdefault(mark, []).append(held)
    return wanted


def marks(combination: Combination, kind_of: Callable[[str, Any], Any]) -> set[Any]:
    """Return the values of a combination, and the pairs of kinds of two of them."""
    kinds = {name: kind_of(name, value) for name, value in combination.items()}
    paired = {name: kind for name, kind in kinds.items() if kind is not ALONE}
    return {(value,) for value in combination.items()} | set(pairs_of(paired))


def drawn_around(
    fixed: Combination,
    factors: Factors,
    exists: Callable[[Combination], bool],
    generator: random.Random,
) -> Combination | None:
    """Draw a combination with the values of `fixed` that exists; None: none was found.

    One that does not exist is changed value by value, every fourth time to a simple one.
    """
    free = [name for name in factors if name not in fixed]
    values = {name: fixed.get(name, generator.choice(of_name)) for name, of_name in factors.items()}
    for change in range(_CHANGES):
        if exists(values):
            return values
        name = generator.choice(free)
        values[name] = factors[name][0] if change % 4 == 3 else generator.choice(factors[name])
    return None


def pairs_of(combination: Combination) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two factors of a combination with their values."""
    return list(itertools.combinations(combination.items(), 2))
