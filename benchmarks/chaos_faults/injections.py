"""Faults put into a run: when in a step, at whom, and for how long."""

import itertools
import signal
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from chaos_faults.drawn_faults import ANY_PHASE, Fault
from chaos_faults.hosted_run import HostedRun
from chaos_faults.pace import USUAL, Pace
from chaos_faults.sightings import Sightings
from chaos_faults.supervised_run import SupervisedRun
from chaos_faults.traffic_of_sites import sent_bytes
from geojax.checkpoint.folder import INTERRUPTED

_PHASE_SECONDS, _PHASE_STEPS = 20.0, 3.0
"""Longest wait for a part of a step: so long, or so many steps if these take longer."""
_SUM_BYTES, _LOOK_SECONDS = 8192, 0.001
_IDLE_SECONDS = 0.005
"""A site that sends nothing for so long is between two messages."""
_SAVE_SECONDS, _RETURN_SECONDS = 180.0, 90.0
_GONE_ON_STEPS = 3.0
"""Time in which the others are to do a step without a silent site, in steps of all."""
_JUST_BEGUN = 0.1
"""Part of a step in which it counts as begun just now."""
_MEDIAN_STEPS = 100
"""Steps of late whose median is taken."""
LOST_SHARE, SLOW_FACTOR = 0.01, 0.1


class Injected(NamedTuple):
    """A fault that was put in; times are seconds on the system's clock."""

    began: float
    over: float
    struck: Mapping[int, float]
    """Sites that may be lost, and when each was struck."""
    expected: Collection[frozenset[int]]
    """Sites that are to be lost: one of these sets."""
    hit: bool
    """True if the drawn part of the step was seen."""
    holder_is_silent: bool = False
    """The holder of the record stands still."""
    next_step_factor: float = 1.0
    """Time that a step may take during a fault that nobody is to notice, in steps."""
    note: str = ""


class Injector:
    """Puts faults into a run.

    Args:
        run: the run.
        sightings: what its sites write.
        bits_per_second: rate at which a site sends.
        pace: steps that pass around a fault.
    """

    def __init__(
        self,
        run: SupervisedRun | HostedRun,
        sightings: Sightings,
        bits_per_second: float,
        pace: Pace = USUAL,
    ):
        self._run, self._seen, self._rate, self.pace = run, sightings, bits_per_second, pace
        self._network, self._lease = run.network, run.lease_seconds
        self._kinds: dict[str, Callable[[Fault], Injected]] = {
            "kill": self._kill,
            "kill_first": self._kill,
            "kill_holder": self._kill,
            "kill_in_save": self._kill_in_save,
            "second_return": self._second_return,
            "pause": self._pause,
            "cut_pair": self._cut,
            "cut_site": self._cut,
            "half_open_idle": self._cut,
            "half_open_transfer": self._cut,
            "resets": self._resets,
            "packet_loss": self._packet_loss,
            "slow_link": self._slow_link,
            "full_disk": self._full_disk,
            "short_cut": self._short_cut,
            "short_half_cut": self._short_cut,
            "short_pause": self._short_pause,
        }

    def put(self, fault: Fault) -> Injected:
        """Put in a fault after its drawn number of steps, and return when it is over."""
        self._steps(fault.steps_before)
        return self._kinds[fault.kind](fault)

    def undo(self) -> None:
        """End what a fault has left."""
        self._network.restore()
        for site in range(len(self._run.sites)):
            self._network.limit_rate(site, self._rate)
            self._run.resume(site)
        for disk in self._run.disks:
            disk.empty()

    def median_step(self) -> float:
        """Return the seconds of a step of late, without long ones."""
        times = [one.time for one in self._seen.steps_of(self._leader(), 0.0)[-_MEDIAN_STEPS:]]
        pairs = itertools.pairwise(times)
        return statistics.median([later - earlier for earlier, later in pairs] or [1.0])

    # Processes.

    def _kill(self, fault: Fault) -> Injected:
        site = fault.site
        if fault.kind == "kill_holder" and (record := self._run.record()) is not None:
            site = record.holder
        hit = self._in_phase(site, fault)
        began = self._run.strike(site, fault.number, signal.SIGKILL)
        return Injected(began, began, {site: began}, [frozenset({site})], hit)

    def _kill_in_save(self, fault: Fault) -> Injected:
        hit = self._in_save(fault.site)
        time.sleep(0.1 * fault.moment * hit)
        hit = hit and self._saves(fault.site)
        began = time.time()
        self._run.strike(fault.site, fault.number, signal.SIGKILL)
        return Injected(began, began, {fault.site: began}, [frozenset({fault.site})], hit)

    def _second_return(self, fault: Fault) -> Injected:
        began = time.time()
        self._run.strike(fault.site, fault.number, signal.SIGKILL)
        killed = self._run.log_sizes()[fault.site]
        returns = self._wait(
            lambda: "which returns to it" in self._run.log_since(fault.site, killed),
            _RETURN_SECONDS,
        )
        time.sleep(10.0 * fault.moment * returns)
        back = self._seen.events_since(began, "back")
        over = time.time()
        self._run.strike(fault.other, fault.number, signal.SIGKILL)
        note = "the first was back before" if back else ""
        struck = {fault.site: began, fault.other: over}
        return Injected(began, over, struck, [frozenset(struck)], returns and not back, note=note)

    def _pause(self, fault: Fault) -> Injected:
        hit = self._in_phase(fault.site, fault)
        held = self._holds(fault.site)
        began = self._run.send(fault.site, signal.SIGSTOP)
        self._until_gone_on(began, {fault.site}, fault)
        self._run.resume(fault.site)
        return Injected(
            began, time.time(), {fault.site: began}, [frozenset({fault.site})], hit, held
        )

    # Links.

    def _cut(self, fault: Fault) -> Injected:
        hit = self._in_phase(fault.site, fault)
        expected = [frozenset({fault.site}), frozenset({fault.other})]
        if fault.kind == "cut_site":  # a holder that reaches the record takes out the others
            others = frozenset(range(len(self._run.sites))) - {fault.site}
            expected = [frozenset({fault.site}), others]
        struck = frozenset.union(*expected)
        began = time.time()
        if fault.kind == "cut_site":
            self._network.isolate(fault.site)
        elif fault.kind == "cut_pair":
            self._network.cut(fault.site, fault.other)
        else:
            self._network.drop(fault.site, fault.other)
        self._until_gone_on(began, struck, fault)
        self._network.restore()
        return Injected(began, time.time(), dict.fromkeys(struck, began), expected, hit)

    def _short_cut(self, fault: Fault) -> Injected:
        hit = self._in_phase(fault.site, fault)
        began = time.time()
        if fault.kind == "short_cut":
            self._network.cut(fault.site, fault.other)
        else:
            self._network.drop(fault.site, fault.other)
        time.sleep(fault.share * self._lease)
        self._network.restore()
        return self._unnoticed_silence(fault, began, hit)

    def _short_pause(self, fault: Fault) -> Injected:
        hit = self._in_phase(fault.site, fault)
        began = self._run.send(fault.site, signal.SIGSTOP)
        time.sleep(fault.share * self._lease)
        self._run.resume(fault.site)
        return self._unnoticed_silence(fault, began, hit)

    def _unnoticed_silence(self, fault: Fault, began: float, hit: bool) -> Injected:
        # TCP sends again later and later; a site that has stopped acting needs signs of all.
        factor = 1.0 + 2.0 * fault.share * self._lease / self.median_step()
        return self._unnoticed(began, hit, f"{fault.share:g} of the eviction time", factor)

    def _resets(self, fault: Fault) -> Injected:
        hit = self._in_phase(fault.site, fault)
        began, count = time.time(), 0
        for number in range(fault.count):
            if number:
                time.sleep(fault.moment * self.median_step())
            count += self._network.reset(fault.site, fault.other)
        note = f"{count} connections in {fault.count} turns"
        return self._unnoticed(began, hit and count > 0, note)

    def _packet_loss(self, fault: Fault) -> Injected:
        began = time.time()
        end = self._network.lose(fault.site, LOST_SHARE)
        try:
            self._steps(fault.count)
        finally:
            end()
        return self._unnoticed(began, True, f"{fault.count} steps", 3.0)

    def _slow_link(self, fault: Fault) -> Injected:
        began = time.time()
        self._network.limit_rate(fault.site, self._rate * SLOW_FACTOR)
        try:
            self._steps(fault.count)
        finally:
            self._network.limit_rate(fault.site, self._rate)
        return self._unnoticed(began, True, f"{fault.count} steps", 1.0 / SLOW_FACTOR)

    # Disks.

    def _full_disk(self, fault: Fault) -> Injected:
        disk, place = self._run.disks[fault.site], self._run.log_sizes()[fault.site]
        self._wait(lambda: self._is_before_save(fault.site), _SAVE_SECONDS)
        began = time.time()
        disk.fill()
        failed = self._wait(
            lambda: "could not be saved" in self._run.log_since(fault.site, place), 30.0
        )
        time.sleep(fault.moment)
        disk.empty()
        return self._unnoticed(began, failed, "" if failed else "no save has failed")

    # Waits.

    def _unnoticed(
        self, began: float, hit: bool, note: str = "", next_step_factor: float = 1.0
    ) -> Injected:
        over = time.time()
        self._steps(self.pace.unnoticed)
        return Injected(began, over, {}, (), hit, next_step_factor=next_step_factor, note=note)

    def _holds(self, site: int) -> bool:
        record = self._run.record()
        return record is not None and record.holder == site

    def _until_gone_on(self, began: float, targets: Collection[int], fault: Fault) -> None:
        """Wait until the others have gone on without one of the targets, or are far too late."""
        names = [self._run.sites[site] for site in targets]

        def gone_on() -> bool:
            told = [
                event
                for event in self._seen.events_since(began, "lost")
                if any(f"site {name} is lost (" in event.text for name in names)
            ]
            if not told:
                return False
            newest = self._seen.newest(told[-1].site)
            return newest is not None and newest.step >= told[-1].step - 1 + self.pace.gone_on

        steps = _GONE_ON_STEPS * self.pace.gone_on * self.median_step()
        self._wait(gone_on, 2 * self._lease + max(8.0, steps))
        time.sleep(4.0 * fault.moment)

    def _leader(self) -> int:
        """Return the site that is furthest."""
        steps = {site: self._seen.newest(site) for site in range(len(self._run.sites))}
        return max(steps, key=lambda site: -1 if steps[site] is None else steps[site].step)

    def _steps(self, count: int) -> bool:
        leader = self._leader()
        newest = self._seen.newest(leader)
        target = (newest.step if newest else 0) + count

        def done() -> bool:
            seen = self._seen.newest(leader)
            return seen is not None and seen.step >= target

        return self._wait(done, 60.0 + 20.0 * count * self.median_step())

    @staticmethod
    def _wait(condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _in_phase(self, site: int, fault: Fault) -> bool:
        """Wait for the drawn part of a step of a site; False: it was not seen in time.

        The harness sees bytes that leave a site and steps that it writes down. *sum* is while
        bytes leave, *apply* is when they have ceased, *forward* begins with the line of a step
        and is uniform over a third of one. *any* is uniform over a step.
        """
        if fault.phase == ANY_PHASE:
            time.sleep(fault.moment * self.median_step())
            return True
        processes = self._run.processes(site)
        if not processes:
            return False
        if fault.phase == "forward":
            newest = self._seen.newest(site)
            step = newest.step if newest else 0
            begun = self._has_just_begun() or self._wait(
                lambda: (one := self._seen.newest(site)) is not None and one.step > step,
                self._phase_seconds(),
            )
            if fault.kind == "half_open_idle":
                return begun and self._idles(processes[0])
            time.sleep(fault.moment * self.median_step() / 3)
            return begun
        sends = self._sends(processes[0])
        if fault.phase == "apply":
            return sends and self._idles(processes[0])
        return sends

    def _has_just_begun(self) -> bool:
        newest = self._seen.newest(self._leader())
        return newest is not None and time.time() - newest.time < _JUST_BEGUN * self.median_step()

    def _phase_seconds(self) -> float:
        return max(_PHASE_SECONDS, _PHASE_STEPS * self.median_step())

    def _sends(self, process: int) -> bool:
        before = sent_bytes(process)
        deadline = time.monotonic() + self._phase_seconds()
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            if (now := sent_bytes(process)) - before >= _SUM_BYTES:
                return True
            before = now
        return False

    def _idles(self, process: int) -> bool:
        before, since = sent_bytes(process), time.monotonic()
        deadline = since + self._phase_seconds()
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            if (now := sent_bytes(process)) != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since >= _IDLE_SECONDS:
                return True
        return False

    def _saves(self, site: int) -> bool:
        folder = self._run.checkpoints[site]
        return any(INTERRUPTED in path.name for path in folder.glob("*"))

    def _is_before_save(self, site: int) -> bool:
        newest, interval = self._seen.newest(site), self._run.save_interval
        return newest is not None and newest.step % interval >= interval - 2

    def _in_save(self, site: int) -> bool:
        """Wait until a site begins a save."""
        self._wait(lambda: not self._saves(site), _SAVE_SECONDS)
        deadline = time.monotonic() + _SAVE_SECONDS
        while time.monotonic() < deadline:
            if self._saves(site):
                return True
            time.sleep(_LOOK_SECONDS)
        return False
