"""A run under one fault after the other, each watched until all sites are level again."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.island_jobs import site_variables
from support.small_runs import command, environment, losses

from chaos_faults.drawn_faults import KINDS, Fault
from chaos_faults.hosted_run import HostedRun
from chaos_faults.injections import Injected, Injector
from chaos_faults.sightings import Sightings
from chaos_faults.supervised_run import RUN, SITES, ProcessFigures, SupervisedRun
from chaos_faults.verdicts import (
    REJOIN_SECONDS,
    Seen,
    Verdict,
    judged,
    longest_gap,
    lost_sites,
)

START_SECONDS = 600.0
"""Longest start of all sites."""
START_STEPS = 5
"""Steps of all sites together after which they count as started."""
_BEFORE_SECONDS, _BEFORE_STEPS = 30.0, 10.0
"""Time before a fault whose steps count as undisturbed: so long, or so many steps if longer."""
_WAIT_SECONDS = 20.0
"""Wait for a return beyond its bound."""
_UNNOTICED_SECONDS, _UNNOTICED_STEPS = 30.0, 5.0
"""Longest wait for steps after a fault that nobody is to notice."""


class Trial(NamedTuple):
    """A fault, what was done, and how it went."""

    sites: Sequence[str]
    """Names of all sites."""
    fault: Fault
    injected: Injected
    verdict: Verdict
    hit_first: bool
    """The first site was struck."""
    hit_holder: bool
    """The holder of the record was struck."""
    first_step: int
    last_step: int
    """Steps between which the fault was."""
    figures: Mapping[str, ProcessFigures]
    """Processes of the survivors, by their sites."""
    rebuilt: bool
    """All sites had to be started again."""

    def as_json(self) -> dict[str, Any]:
        """Return what the record keeps."""
        injected = self.injected._asdict()
        struck = {
            self.sites[site]: round(at - self.injected.began, 3)
            for site, at in self.injected.struck.items()
        }
        injected |= {"struck": struck, "over": round(self.injected.over - self.injected.began, 3)}
        expected = [
            [self.sites[site] for site in sorted(sites)] for sites in self.injected.expected
        ]
        injected |= {"expected": expected}
        fault = self.fault._asdict()
        fault |= {"site": self.sites[self.fault.site], "other": self.sites[self.fault.other]}
        verdict = self.verdict._asdict()
        verdict["lost"] = [self.sites[site] for site in self.verdict.lost]
        figures = {site: figures._asdict() for site, figures in self.figures.items()}
        return {
            **fault,
            "injected": injected,
            **verdict,
            "hit_first": self.hit_first,
            "hit_holder": self.hit_holder,
            "steps": [self.first_step, self.last_step],
            "survivors": figures,
            "rebuilt": self.rebuilt,
        }


class Campaign:
    """The faults of a run, one after the other.

    Args:
        run: the run.
        sightings: what its sites write.
        injector: puts faults in.
        rejoin_seconds: bound of a return.
        rejoin_steps: steps that are added to that bound.
    """

    def __init__(
        self,
        run: SupervisedRun | HostedRun,
        sightings: Sightings,
        injector: Injector,
        rejoin_seconds: float = REJOIN_SECONDS,
        rejoin_steps: float = 0.0,
    ):
        self._run, self._seen, self._injector = run, sightings, injector
        self._rejoin_seconds, self._rejoin_steps = rejoin_seconds, rejoin_steps
        self._built_at = 0.0
        """Time of the last start of all sites by `rebuild`, which goes back to a checkpoint."""
        self.calm_gap = 0.0
        """Longest time between two steps without faults, in medians."""

    def begin(self, calm_seconds: float) -> bool:
        """Wait until all sites train, and watch them for so long; False: they do not."""
        if not self._level(0.0, START_STEPS, START_SECONDS):
            return False
        began = time.time()
        time.sleep(calm_seconds)
        sites = range(len(self._run.sites))
        interval = self._run.save_interval
        self.calm_gap = max(
            longest_gap(self._seen.steps_of(site, began), interval) for site in sites
        )
        return True

    def put(self, fault: Fault) -> Trial:
        """Put in a fault, and watch until all sites are level or too late."""
        sizes = self._run.log_sizes()
        record = self._run.record()
        first_step = self._newest_step()
        injected = self._injector.put(fault)
        level = self._is_over(fault, injected)
        until = time.time()
        verdict = self._judge(fault, injected, sizes, until, level)
        survivors = [site for site in range(len(self._run.sites)) if site not in verdict.lost]
        figures = {}
        for site in survivors:
            if (found := self._run.figures(site)) is not None:
                figures[self._run.sites[site]] = found
        trial = Trial(
            self._run.sites,
            fault,
            injected,
            verdict,
            hit_first=0 in injected.struck,
            hit_holder=record is not None and record.holder in injected.struck,
            first_step=first_step,
            last_step=self._newest_step(),
            figures=figures,
            rebuilt=not level,
        )
        self._injector.undo()
        return trial

    def rebuild(self) -> bool:
        """Start all sites again, from the newest checkpoint of all; False: they do not train."""
        if isinstance(self._run, HostedRun):
            return False
        self._run.end()
        self._injector.undo()
        self._run.share_newest_checkpoint()
        self._run.start()
        self._built_at = time.time()
        return self.settled()

    def settled(self) -> bool:
        """Wait until all sites have done steps together from now on; False: they do not."""
        return self._level(time.time(), START_STEPS, START_SECONDS)

    def rejoin_bound(self) -> float:
        """Return the seconds in which a lost site is to be back."""
        return self._rejoin_seconds + self._rejoin_steps * self._injector.median_step()

    def _judge(
        self, fault: Fault, injected: Injected, sizes: Sequence[int], until: float, level: bool
    ) -> Verdict:
        began = injected.began
        sites = range(len(self._run.sites))
        lease = self._run.lease_seconds
        codes = {
            site: found
            for site in sites
            if (found := self._run.codes_since(site, sizes[site])) is not None
        }
        before = max(_BEFORE_SECONDS, _BEFORE_STEPS * self._injector.median_step())
        since = max(began - before, self._built_at)
        return judged(
            Seen(
                self._run.sites,
                KINDS[fault.kind].outcome,
                injected.expected,
                lease,
                injected.holder_is_silent,
                began,
                injected.struck,
                injected.over,
                until,
                injected.next_step_factor,
                {site: self._seen.steps_of(site, since) for site in sites},
                self._seen.events_since(began, "lost"),
                codes,
                level,
                self._run.save_interval,
                self._seen.events_since(began, "back"),
                self.rejoin_bound(),
                self.calm_gap,
            )
        )

    def _is_over(self, fault: Fault, injected: Injected) -> bool:
        """Wait until all sites are level after a fault; False: they are too late."""
        steps = self._injector.pace.level
        if KINDS[fault.kind].outcome == "nothing":
            longest = max(_UNNOTICED_SECONDS, _UNNOTICED_STEPS * self._injector.median_step())
            return self._level(injected.over, steps or 0, longest)
        longest = self.rejoin_bound() + _WAIT_SECONDS
        if steps is None:
            return self._taken_back(max(injected.struck.values()), longest)
        return self._level(injected.over, steps, longest)

    def _taken_back(self, since: float, seconds: float) -> bool:
        """Wait until the record has all sites again, after it has lost some since a time."""

        def back() -> bool:
            record = self._run.record()
            if record is None or len(record.members) < len(self._run.sites):
                return False
            lost, back = (self._seen.events_since(since, kind) for kind in ("lost", "back"))
            if not lost or not back:
                return False
            others = set(range(len(self._run.sites))) - set(lost_sites(self._run.sites, lost))
            step = max(event.step for event in back)
            newest = [self._seen.newest(site) for site in others]
            # A site writes the line of a step when it has computed the next one.
            return all(one is not None and one.step >= step - 2 for one in newest)

        deadline = time.monotonic() + seconds
        while not (done := back()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return done

    def _level(self, since: float, level_steps: int, seconds: float) -> bool:
        """Wait until all sites take part and have done steps together after a time."""
        deadline = time.monotonic() + seconds
        level_from: int | None = None
        while time.monotonic() < deadline:
            time.sleep(0.05)
            record = self._run.record()
            if record is None or len(record.members) < len(self._run.sites):
                level_from = None
                if all(self._run.ended_for_good(site) for site in range(len(self._run.sites))):
                    return False
                continue
            newest = [self._seen.newest(site) for site in range(len(self._run.sites))]
            steps = [one.step for one in newest if one is not None and one.time > since]
            if len(steps) < len(self._run.sites):
                continue
            if level_from is None:
                level_from = max(steps)
            if min(steps) >= level_from + level_steps:
                return True
        return False

    def _newest_step(self) -> int:
        newest = [self._seen.newest(site) for site in range(len(self._run.sites))]
        return max((one.step for one in newest if one is not None), default=0)


def undisturbed_losses(
    folder: Path, config: Path, devices: int, last_step: int, say: Callable[[str], None]
) -> dict[int, float]:
    """Train without faults, namespaces and quotas, a process a site; return the losses by step.

    Args:
        folder: of the run.
        config: of the run.
        devices: of each site.
        last_step: the run ends when it has done so many steps.
        say: shows a line.
    """
    folder.mkdir()
    record = folder / "membership.json"
    jobs, logs = [], []
    for site, variables in zip(SITES, site_variables(SITES), strict=True):
        line = command(config, "--run_directory", str(folder / RUN))
        line += ["--islands.lease.path", str(record), "--simulate_devices", str(devices)]
        logs.append(log := folder / f"{site}.log")
        with log.open("wb") as output:
            cache = {"XDG_CACHE_HOME": str(folder / f"{site}-cache")}
            jobs.append(
                subprocess.Popen(
                    line, env=environment(**variables, **cache), stdout=output, stderr=output
                )
            )
    metrics = folder / RUN / SITES[0]
    found: dict[int, float] = {}
    try:
        while max(found, default=0) < last_step and all(job.poll() is None for job in jobs):
            time.sleep(1.0)
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                found = losses(metrics)
        if any(job.poll() for job in jobs):
            say("\n".join(log.read_text(errors="replace")[-1000:] for log in logs))
    finally:
        for job in jobs:
            job.send_signal(signal.SIGKILL)
            job.wait()
    return found


def other_losses(seen: Mapping[int, float], undisturbed: Mapping[int, float]) -> dict[int, float]:
    """Return the relative distance of each loss that is not the undisturbed one, by step."""
    return {
        step: abs(loss - undisturbed[step]) / max(abs(undisturbed[step]), sys.float_info.min)
        for step, loss in seen.items()
        if step in undisturbed and loss != undisturbed[step]
    }
