"""Steps of a run as its sites write them down, and what follows of them."""

import collections
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from kill_sides.work import SITES

_AROUND = 20
"""Steps whose losses are averaged."""


class Done(NamedTuple):
    """A step that a site has done."""

    time: float
    """Seconds on the system's clock."""
    site: int
    step: int
    tokens: int
    """Of the step, over all sites that took part."""
    loss: float
    participants: int
    """Sites that took part."""


class Progress:
    """All steps so far, and the tokens that they trained on."""

    def __init__(self) -> None:
        self._all: list[Done] = []

    def add(self, steps: Sequence[Done]) -> None:
        """Take in more steps."""
        self._all += steps
        self._all.sort(key=lambda done: done.time)

    def firsts(self, since: float = 0.0, until: float = float("inf")) -> list[Done]:
        """Return each step once, as the first site has written it down."""
        seen: dict[int, Done] = {}
        for done in self._all:
            if since <= done.time < until:
                seen.setdefault(done.step, done)
        return list(seen.values())

    def are_level(self, since: float) -> bool:
        """Return True if each site has done a step after a time in which all take part."""
        newest = {done.site: done for done in self._all if done.time > since}
        return len(newest) == len(SITES) and all(
            done.participants == len(SITES) for done in newest.values()
        )

    def tokens_per_second(self, since: float, until: float) -> float:
        """Return the rate in a span."""
        return sum(done.tokens for done in self.firsts(since, until)) / (until - since)

    def longest_pause(self, since: float, until: float) -> float:
        """Return the longest time in a span in which no site has done a step."""
        times = [since, *(done.time for done in self.firsts(since, until)), until]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def loss_after(self, tokens: int) -> float | None:
        """Return the mean loss of the steps around a number of tokens; None: it has not so many."""
        of_sites = collections.defaultdict(list)
        for done in self._all:
            of_sites[done.step].append(done.loss)
        total, losses = 0, []
        for done in self.firsts():
            total += done.tokens
            losses.append(statistics.fmean(of_sites[done.step]))
            if total >= tokens:
                return statistics.fmean(losses[-_AROUND:])
        return None

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return sum(done.tokens for done in self.firsts())
