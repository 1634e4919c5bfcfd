"""Few combinations of many factors that hold every pair of values of two factors."""

import itertools
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

_CHANGES = 150
"""Values that are drawn anew in a combination that does not exist, before it is given up."""


def pairwise(
    factors: Factors,
    exists: Callable[[Combination], bool],
    kind_of: Callable[[str, Any], Any] = lambda name, value: value,
    cost_of: Callable[[Combination], float] = lambda combination: 1.0,
    seed: int = 0,
) -> list[Combination]:
    """Combinations that hold every value, and every pair of kinds of them, that can occur.

    The same for a seed. Greedy: of the combinations drawn for the first pair that is missing, the
    one that brings most for its cost.

    Args:
        factors: the values of each.
        exists: tells combinations that exist from others.
        kind_of: the kind of a factor's value; `ALONE` for all values of a factor that pairs with
            no other. Without it each value is a kind.
        cost_of: what a combination costs; without it all cost the same.
        seed: of the draws.
    """
    generator = random.Random(seed)
    single = [{name: value} for name, values in factors.items() for value in values]
    double = [
        {one: value, other: another}
        for (one, values), (other, others) in itertools.combinations(factors.items(), 2)
        for value, another in itertools.product(values, others)
    ]
    # What a combination must hold, and some values that have it: several values are of a kind.
    missing: dict[Any, list[Combination]] = {}
    for held in (*double, *single):
        for mark in marks(held, kind_of):
            if len(mark) == len(held):
                missing.setdefault(mark, []).append(held)
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
        best = max(
            existing, key=lambda each: len(missing.keys() & marks(each, kind_of)) / cost_of(each)
        )
        chosen.append(best)
        for found in marks(best, kind_of):
            missing.pop(found, None)
    return chosen


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
