"""Faults drawn by a seed: kinds, targets, phases and lengths, before the run begins."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from chaos_faults.pace import USUAL, Pace

Outcome = Literal["death", "silence", "nothing"]
"""What the run is to notice: a process that ended, one that is silent, or nothing at all."""
_Value = TypeVar("_Value")
PHASES = ("forward", "sum", "apply")
"""Parts of a step. A save and a join are kinds of their own."""
ANY_PHASE = "any"
"""All of a step, where nobody sees its parts."""


class Kind(NamedTuple):
    """A kind of faults."""

    outcome: Outcome
    text: str
    in_default: bool = True
    """Drawn unless --kinds says otherwise."""


KINDS = {
    "kill": Kind("death", "kill -9 of a drawn site"),
    "kill_first": Kind("death", "kill -9 of the first site, at which all sites start"),
    "kill_holder": Kind("death", "kill -9 of the holder of the record"),
    "kill_in_save": Kind("death", "kill -9 while the site writes a checkpoint"),
    "second_return": Kind("death", "kill -9 of a second site while the first one returns"),
    "pause": Kind("silence", "SIGSTOP, and SIGCONT when the others have gone on"),
    "cut_pair": Kind("silence", "all packets between two sites are dropped"),
    "cut_site": Kind("silence", "all packets from and to a site are dropped"),
    "half_open_idle": Kind("silence", "packets in one direction are dropped, between two messages"),
    "half_open_transfer": Kind("silence", "packets in one direction are dropped, in a message"),
    "resets": Kind("nothing", "all TCP connections of two sites are reset, up to ten times"),
    "packet_loss": Kind("nothing", "1% of the packets of a site is lost, for 10 to 30 steps"),
    "slow_link": Kind("nothing", "a site sends at a tenth of the rate, for 3 to 10 steps"),
    "full_disk": Kind("nothing", "a site's disk is full during a save"),
    "short_cut": Kind("nothing", "a link is cut for 0.2, 0.5 or 0.9 of the eviction time", False),
    "short_half_cut": Kind("nothing", "the same, in one direction", False),
    "short_pause": Kind("nothing", "SIGSTOP for as long", False),
}
SHORT_CUTS = (0.2, 0.5, 0.9)
"""Parts of the eviction time."""


class Fault(NamedTuple):
    """A fault, as the seed has drawn it."""

    number: int
    """From 1."""
    kind: str
    site: int
    """Number of the site; that of `kill_first` is 0, and that of `kill_holder` is found later."""
    other: int
    """Another site: the other end of the link, or the second to be killed."""
    steps_before: int
    """Steps that pass before it, from 0 to 20."""
    phase: str
    """Part of the step."""
    moment: float
    """Place in the phase, and of anything else that is drawn at the fault itself: 0 to 1."""
    share: float
    """Part of the eviction time, for a short cut or pause."""
    count: int
    """Steps for which a link is bad, from 3 to 30, or resets."""


def drawn_faults(
    count: int, seed: int, sites: int, kinds: Sequence[str], pace: Pace = USUAL
) -> list[Fault]:
    """Draw so many faults: each kind as often as any other, or once more, in any order.

    So does each part of the eviction time among the faults of a kind.

    Args:
        count: number of faults.
        seed: of all that is drawn.
        sites: number of sites.
        kinds: names of kinds; one that is named twice is drawn twice as often.
        pace: its numbers of steps are not exceeded.
    """
    rng = random.Random(seed)
    names = list(itertools.islice(_equally_often(kinds, rng), count))
    shares = {kind: _equally_often(SHORT_CUTS, random.Random(f"{seed} {kind}")) for kind in kinds}
    faults = []
    for number, kind in enumerate(names, start=1):
        site, other = rng.sample(range(sites), 2)
        if kind == "kill_first":
            site, other = 0, rng.randrange(1, sites)
        count_of = {
            "resets": rng.randint(1, 10),
            "packet_loss": rng.randint(10, 30),
            "slow_link": rng.randint(3, 10),
        }
        phase = {
            "kill_in_save": "save",
            "full_disk": "save",
            "second_return": "join",
            "half_open_idle": "forward",
            "half_open_transfer": "sum",
        }.get(kind, rng.choice(PHASES))
        steps = min(rng.randint(0, USUAL.before), pace.before)
        moment, share = rng.random(), next(shares[kind])
        turns = min(count_of.get(kind, 0), pace.bad_link)
        faults.append(Fault(number, kind, site, other, steps, phase, moment, share, turns))
    return faults


def _equally_often(values: Sequence[_Value], rng: random.Random) -> Iterator[_Value]:
    """Yield values without end: all of them in any order, again and again."""
    while True:
        yield from rng.sample(list(values), len(values))
