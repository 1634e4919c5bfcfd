"""Judgment of one fault from what was seen: each bound that did not hold, in words."""

import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from chaos_faults.drawn_faults import Outcome
from chaos_faults.sightings import EventSeen, StepSeen

DEATH_SECONDS, NEXT_STEP_SECONDS, REJOIN_SECONDS = 1.0, 2.0, 60.0
SLACK_SECONDS = 1.5
"""A site sends signs of life at least each second, and looks at others between two actions."""
LONGEST_GAP = 2.0
"""Time between two steps of a survivor, in medians of its steps without the lost site."""
STEPS_OF_SAVE = 5
"""Steps after a save begins that are slower without faults too, and of which no gap counts.

All count where saves are no further apart."""
FENCED = 4


class Seen(NamedTuple):
    """What was seen of a fault; times are seconds on the system's clock, sites are numbers."""

    names: Sequence[str]
    """Names of all sites."""
    outcome: Outcome
    expected: Collection[frozenset[int]]
    """Sites that are to be lost: one of these sets."""
    lease_seconds: float
    """The eviction time."""
    holder_is_silent: bool
    """The holder of the record stands still: another member takes it out, later."""
    began: float
    struck: Mapping[int, float]
    """Time at which each site was struck."""
    over: float
    """End of the fault, when its sites can return."""
    until: float
    """End of the watch."""
    next_step_factor: float
    """Time that a step may take while a fault lasts that nobody is to notice, in steps."""
    steps: Mapping[int, Sequence[StepSeen]]
    """Steps of each site, from 30 s before the fault on."""
    lost: Sequence[EventSeen]
    """Events that say so."""
    codes: Mapping[int, Sequence[int]]
    """Exit codes of each site's processes that ended after the fault began, where they are seen."""
    members_back: bool
    """All sites train together at the end."""
    save_interval: int
    """Steps from one save to the next."""
    back: Sequence[EventSeen] = ()
    """Events that say that a site is back."""
    rejoin_seconds: float = REJOIN_SECONDS
    """Longest return."""
    calm_gap: float = LONGEST_GAP
    """Longest time between two steps without faults, in medians: saves and other programs."""


class Verdict(NamedTuple):
    """Seconds of a fault, and what was missed; None: it did not come, or is not to come."""

    lost: tuple[int, ...]
    detection: float | None
    """Until the last of the survivors says that the site is lost."""
    next_step: float | None
    """From there until all survivors have done a step."""
    rejoin: float | None
    """From the end of the fault until the site has done a step with the others, or is taken into
    the record if the watch ends then."""
    median_step: float | None
    """Of survivors without the lost site; of all, if none is lost."""
    longest_gap: float | None
    """Between two steps of a survivor beside saves, until the site is back; of all steps, if no
    site is lost."""
    lost_steps: int
    """Steps that a survivor has done again."""
    misses: tuple[str, ...]
    late: tuple[str, ...] = ()
    """The misses among these that are about seconds alone."""

    @property
    def has_no_gap(self) -> bool:
        """No two steps of a survivor are further apart than two medians."""
        longest, median = self.longest_gap, self.median_step
        return longest is None or median is None or longest <= LONGEST_GAP * median


def longest_gap(steps: Sequence[StepSeen], save_interval: int) -> float:
    """Return the longest time between the ends of two steps of a site beside saves, in medians."""
    gaps = _intervals(steps, save_interval)
    return max(gaps) / statistics.median(gaps) if gaps else 0.0


def judged(seen: Seen) -> Verdict:
    """Hold what was seen to the bounds."""
    lost = lost_sites(seen.names, seen.lost)
    survivors = [site for site in range(len(seen.names)) if site not in lost]
    misses = _wrong_losses(seen, lost)
    lost_steps = sum(_steps_done_again(seen.steps[site]) for site in survivors)
    if lost_steps:
        misses.append(f"survivors did {lost_steps} steps again")
    for site in survivors:
        if codes := seen.codes.get(site):
            misses.append(f"survivor {seen.names[site]} ended with code {codes[0]}")
    if seen.outcome == "nothing" or not lost:
        return _of_nobody(seen, survivors, lost_steps, misses)
    return _of_lost(seen, lost, survivors, lost_steps, misses)


def lost_sites(names: Sequence[str], events: Sequence[EventSeen]) -> tuple[int, ...]:
    """Return the sites that are lost by what others say.

    Args:
        names: of all sites.
        events: say that a site is lost.
    """
    return tuple(
        site
        for site, name in enumerate(names)
        if any(f"site {name} is lost (" in event.text for event in events)
    )


def _wrong_losses(seen: Seen, lost: tuple[int, ...]) -> list[str]:
    if frozenset(lost) in seen.expected or (not lost and seen.outcome == "nothing"):
        return []

    def named(sites: Collection[int]) -> str:
        return " and ".join(seen.names[site] for site in sorted(sites)) or "nobody"

    wanted = " or ".join(map(named, seen.expected)) or "nobody"
    return [f"{named(lost)} lost instead of {wanted}"]


def _steps_done_again(steps: Sequence[StepSeen]) -> int:
    """Count the steps that a site did although it had done them before."""
    newest, again = 0, set()
    for seen in steps:
        if seen.step <= newest:
            again.add(seen.step)
        newest = max(newest, seen.step)
    return len(again)


def _of_nobody(seen: Seen, survivors: Sequence[int], lost_steps: int, misses: list[str]) -> Verdict:
    intervals = [
        seconds for site in survivors for seconds in _intervals(seen.steps[site], before=seen.began)
    ]
    gaps = [
        seconds for site in survivors for seconds in _intervals(seen.steps[site], since=seen.began)
    ]
    median = statistics.median(intervals) if intervals else None
    longest = max(gaps, default=None)
    later_steps = [
        [one.time for one in seen.steps[site] if one.time > seen.began] for site in survivors
    ]
    next_step = None
    if later_steps and all(later_steps):
        next_step = max(times[0] for times in later_steps) - seen.began
    late = []
    if longest is None or median is None:
        misses.append("no step after the fault")
    elif longest > (bound := seen.next_step_factor * median + NEXT_STEP_SECONDS):
        late.append(f"{longest:.1f} s between two steps, {bound:.1f} allowed")
    if not seen.members_back:
        misses.append("not all sites train together at the end")
    figures = (None, next_step, None, median, longest, lost_steps)
    return Verdict((), *figures, (*misses, *late), tuple(late))


def _of_lost(
    seen: Seen,
    lost: tuple[int, ...],
    survivors: Sequence[int],
    lost_steps: int,
    misses: list[str],
) -> Verdict:
    told = [event for event in seen.lost if event.site in survivors]
    if not survivors or not told:
        return Verdict(lost, None, None, None, None, None, lost_steps, (*misses, "nobody is left"))
    waits, known_at = [], seen.began
    late: list[str] = []
    for site in lost:
        for survivor in survivors:
            notices = [
                event.time
                for event in told
                if event.site == survivor and f"site {seen.names[site]} is lost (" in event.text
            ]
            if not notices:
                misses.append(f"{seen.names[survivor]} did not say that {seen.names[site]} is lost")
                continue
            if site in seen.struck:
                waits.append(notices[0] - seen.struck[site])
                known_at = max(known_at, notices[0])
    detection = max(waits, default=None)
    allowed = DEATH_SECONDS
    if seen.outcome == "silence":
        allowed = seen.lease_seconds * (2 if seen.holder_is_silent else 1) + SLACK_SECONDS
    if detection is not None and detection > allowed:
        late.append(f"detected after {detection:.1f} s, {allowed:.1f} allowed")
    first = {
        site: next((one for one in seen.steps[site] if one.time > known_at), None)
        for site in survivors
    }
    back = _back_at(seen, lost, max(event.step for event in told))
    # The step that is under way when a site is lost is longer: the next step is bounded apart.
    interrupted = {
        site: max((event.step for event in told if event.site == site), default=0)
        for site in survivors
    }
    intervals = [
        seconds
        for site in survivors
        for seconds in _intervals(
            [one for one in seen.steps[site] if one.step >= interrupted[site]],
            seen.save_interval,
            before=back or seen.until,
        )
    ]
    median = statistics.median(intervals) if intervals else None
    next_step = None
    if any(one is None for one in first.values()):
        misses.append("the survivors did not go on")
    else:
        next_step = max(one.time for one in first.values() if one is not None) - known_at
        bound = (median or 0.0) + NEXT_STEP_SECONDS
        if next_step > bound:
            late.append(f"next step after {next_step:.1f} s, {bound:.1f} allowed")
    longest = max(intervals, default=None)
    allowed_gap = max(LONGEST_GAP, seen.calm_gap)
    if longest is not None and median is not None and longest > allowed_gap * median:
        late.append(f"{longest:.2f} s between two steps, median {median:.2f} s")
    rejoin = None if back is None else back - seen.over
    if back is None or not seen.members_back:
        rejoin = None
        misses.append("no rejoin")
    elif rejoin is not None and rejoin > seen.rejoin_seconds:
        late.append(f"rejoin after {rejoin:.0f} s, {seen.rejoin_seconds:.0f} allowed")
    if seen.outcome == "silence":
        misses += [
            f"{seen.names[site]} ended with code {codes[0] if codes else 'none'}, not {FENCED}"
            for site in lost
            if site in seen.codes and (codes := tuple(seen.codes[site]))[:1] != (FENCED,)
        ]
    figures = (detection, next_step, rejoin, median, longest, lost_steps)
    return Verdict(lost, *figures, (*misses, *late), tuple(late))


def _back_at(seen: Seen, lost: tuple[int, ...], step: int) -> float | None:
    """Return the time at which the last of the lost sites has done a step after that one.

    One that has done none yet is back when the others say so.
    """
    times = []
    for site in lost:
        words = f"site {seen.names[site]} is back"
        told = [event.time for event in seen.back if words in event.text and event.time > seen.over]
        later = [one.time for one in seen.steps[site] if one.step > step and one.time > seen.over]
        if not later and not told:
            return None
        times.append(later[0] if later else told[-1])
    return max(times)


def _intervals(
    steps: Sequence[StepSeen],
    save_interval: int = 0,
    since: float = 0.0,
    before: float = float("inf"),
) -> list[float]:
    """Return the seconds between the ends of each two steps in a row whose lines came in a span.

    The first line may have come before it. Those beside a save are left out if its interval is
    given and leaves any. A site whose disk is full writes down none of its steps, so that two lines
    may be many steps apart.
    """
    return [
        later.seconds
        for earlier, later in itertools.pairwise(steps)
        if later.time > since and earlier.time < before and later.step == earlier.step + 1
        if save_interval <= STEPS_OF_SAVE or (later.step - 1) % save_interval >= STEPS_OF_SAVE
    ]
