"""Few combinations of many factors that hold every pair of values of two factors."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TRIES = 400
"""Random combinations that hold a pair: the best is taken, and if none exists, the pair cannot."""


def pairwise(
    factors: Mapping[str, Sequence[Any]], exists: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Combinations of the factors' values in which every pair that can occur does; always the same.

    Greedy: of the combinations drawn for the first pair that is missing, the one that brings most.
    """
    generator = random.Random(0)
    missing = {
        pair: None
        for (one, values), (other, others) in itertools.combinations(factors.items(), 2)
        for pair in itertools.product(
            [(one, value) for value in values], [(other, value) for value in others]
        )
    }
    chosen = []
    while missing:
        pair = next(iter(missing))
        drawn = [
            {name: generator.choice(values) for name, values in factors.items()} | dict(pair)
            for _ in range(_TRIES)
        ]
        existing = [each for each in drawn if exists(each)]
        if not existing:
            del missing[pair]
            continue
        best = max(existing, key=lambda each: sum(held in missing for held in pairs_of(each)))
        chosen.append(best)
        for held in pairs_of(best):
            missing.pop(held, None)
    return chosen


def pairs_of(combination: Mapping[str, Any]) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two factors of a combination with their values."""
    return list(itertools.combinations(combination.items(), 2))
