"""What `benchmarks/chaos.py` does without a run: drawing, reading of files, judging."""

import collections
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from support.processes import wait_until
from support.small_runs import write_config

from geojax.config.run_config import RunConfig
from geojax.errors import UserError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NAMES = ("east", "mid", "west")


@pytest.fixture
def chaos(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield lambda name: importlib.import_module(f"chaos_faults.{name}")
    for name in [name for name in sys.modules if name.startswith("chaos")]:
        del sys.modules[name]


def test_a_seed_draws_the_same_faults_and_each_kind_as_often(chaos):
    drawn = chaos("drawn_faults")
    kinds = [kind for kind, about in drawn.KINDS.items() if about.in_default]
    faults = drawn.drawn_faults(100, 7, 3, kinds)
    assert faults == drawn.drawn_faults(100, 7, 3, kinds)
    assert faults != drawn.drawn_faults(100, 8, 3, kinds)
    assert [fault.number for fault in faults] == list(range(1, 101))
    counts = collections.Counter(fault.kind for fault in faults)
    assert set(counts) == set(kinds)
    assert min(counts.values()) >= 6
    assert all(fault.site != fault.other for fault in faults)
    assert all(fault.site == 0 for fault in faults if fault.kind == "kill_first")
    assert {fault.phase for fault in faults} == {"forward", "sum", "apply", "save", "join"}


def test_faults_close_to_each_other_are_the_same_with_fewer_steps(chaos):
    drawn, pace = chaos("drawn_faults"), chaos("pace")
    kinds = ["kill", "kill", "resets", "slow_link"]
    usual = drawn.drawn_faults(8, 7, 3, kinds)
    close = drawn.drawn_faults(8, 7, 3, kinds, pace.CLOSE)
    assert {(fault.steps_before, fault.count) for fault in close} == {(0, 0), (0, 1)}
    counts = {"kill": 0, "resets": 1, "slow_link": 1}
    assert close == [fault._replace(steps_before=0, count=counts[fault.kind]) for fault in usual]
    assert sum(fault.kind == "kill" for fault in close) == 4


def test_each_part_of_the_eviction_time_comes_as_often_in_each_kind(chaos):
    drawn = chaos("drawn_faults")
    faults = drawn.drawn_faults(60, 7, 3, ["short_cut", "short_half_cut"])
    counts = collections.Counter((fault.kind, fault.share) for fault in faults)
    assert len(counts) == 6
    assert set(counts.values()) == {10}


def test_a_growing_file_gives_whole_lines_once_and_tells_when_it_is_new(chaos, tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = chaos("growing_file").GrowingFile(path)
    assert file.new_lines() == ([], False)
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert file.new_lines() == ([{"step": 1}, {"step": 2}], False)
    with path.open("a") as appended:
        appended.write('ep": 3}\n')
    assert file.new_lines() == ([{"step": 3}], False)
    replacement = tmp_path / "metrics.partial"
    replacement.write_text('{"step": 1}\n')
    replacement.replace(path)
    assert file.new_lines() == ([{"step": 1}], True)
    assert file.new_lines() == ([], False)


def test_steps_that_a_restart_keeps_were_seen_before_and_others_are_done_again(chaos, tmp_path):
    def write(*steps):
        lines = [
            json.dumps({"step": step, "loss": 10.0 - step, "time": 5.0, "seconds": 1.0}) + "\n"
            for step in steps
        ]
        (tmp_path / "metrics.partial").write_text("".join(lines))
        (tmp_path / "metrics.partial").replace(tmp_path / "metrics.jsonl")

    sightings = chaos("sightings").Sightings([tmp_path])
    write(1, 2, 3)
    sightings.look()
    write(1, 2)
    sightings.look()
    assert [seen.step for seen in sightings.steps] == [1, 2, 3]
    with (tmp_path / "metrics.jsonl").open("a") as appended:
        appended.write(json.dumps({"step": 3, "loss": 1.5, "time": 6.0, "seconds": 1.0}) + "\n")
    sightings.look()
    assert [seen.step for seen in sightings.steps] == [1, 2, 3, 3]
    assert sightings.conflicts == ["step 3: 1.5 at site 0, 7.0 before"]


def steps_of(chaos, site, first, last, start, *, hole=(), late=(1000, 0.0)):
    """Steps a second apart, of which some are missing, or come later by so many seconds."""
    seen, (from_step, seconds) = chaos("sightings").StepSeen, late
    return [
        seen(
            start + step - first + seconds * (step >= from_step),
            site,
            step,
            1.0,
            1.0 + seconds * (step == from_step),
        )
        for step in range(first, last + 1)
        if step not in hole
    ]


def lost_at(chaos, time, site, name, step=6):
    text = f"site {name} is lost (it refuses connections); the run goes on"
    return chaos("sightings").EventSeen(time, site, step, "lost", text)


def seen_kill(chaos, **changes):
    """East is killed at 104.5, noticed at 104.7, and back with step 30."""
    values = {
        "names": NAMES,
        "outcome": "death",
        "expected": [frozenset({0})],
        "lease_seconds": 8.0,
        "holder_is_silent": True,
        "began": 104.5,
        "struck": {0: 104.5},
        "over": 104.5,
        "until": 140.0,
        "next_step_factor": 1.0,
        "steps": {
            0: steps_of(chaos, 0, 1, 40, 100.0, hole=range(5, 30)),
            1: steps_of(chaos, 1, 1, 40, 100.0),
            2: steps_of(chaos, 2, 1, 40, 100.0),
        },
        "lost": [lost_at(chaos, 104.6, 1, "east"), lost_at(chaos, 104.7, 2, "east")],
        "codes": {0: (137,)},
        "members_back": True,
        "save_interval": 1000,
    }
    return chaos("verdicts").Seen(**values | changes)


def test_a_kill_is_recovered_from_within_its_bounds(chaos):
    verdict = chaos("verdicts").judged(seen_kill(chaos))
    assert verdict.misses == ()
    assert verdict.lost == (0,)
    assert verdict.detection == pytest.approx(0.2)
    assert verdict.next_step == pytest.approx(0.3)
    assert verdict.rejoin == pytest.approx(24.5)
    assert verdict.median_step == verdict.longest_gap == 1.0
    assert verdict.has_no_gap


def missed(chaos, **changes):
    return chaos("verdicts").judged(seen_kill(chaos, **changes)).misses


def test_each_bound_that_does_not_hold_is_named(chaos):
    late = [lost_at(chaos, 106.0, 1, "east"), lost_at(chaos, 106.0, 2, "east")]
    assert missed(chaos, lost=late) == ("detected after 1.5 s, 1.0 allowed",)
    assert missed(chaos, members_back=False) == ("no rejoin",)
    assert missed(chaos, codes={1: (1,)}) == ("survivor mid ended with code 1",)
    mid_too = [*seen_kill(chaos).lost, lost_at(chaos, 104.8, 2, "mid")]
    assert "east and mid lost instead of east" in missed(chaos, lost=mid_too)
    assert missed(chaos, lost=[])[0] == "nobody lost instead of east"
    one = [lost_at(chaos, 104.6, 1, "east")]
    assert missed(chaos, lost=one) == ("west did not say that east is lost",)
    steps = dict(seen_kill(chaos).steps)
    steps[1] = steps_of(chaos, 1, 1, 40, 100.0, late=(8, 4.0))
    assert missed(chaos, steps=steps) == ("5.00 s between two steps, median 1.00 s",)
    assert missed(chaos, steps=steps, calm_gap=5.0) == ()
    assert missed(chaos, steps=steps, save_interval=7) == (), "a save began after step 7"
    steps[1] = steps_of(chaos, 1, 1, 40, 100.0, late=(6, 6.0))
    assert missed(chaos, steps=steps) == ("next step after 6.3 s, 3.0 allowed",)
    again = steps_of(chaos, 2, 1, 20, 100.0) + steps_of(chaos, 2, 19, 40, 120.0)
    assert missed(chaos, steps={**seen_kill(chaos).steps, 2: again}) == (
        "survivors did 2 steps again",
    )


def test_a_site_without_a_step_is_back_when_the_others_say_so(chaos):
    steps = {site: steps_of(chaos, site, 1, 20, 100.0) for site in range(3)}
    steps[0] = steps_of(chaos, 0, 1, 4, 100.0)
    assert missed(chaos, steps=steps) == ("no rejoin",)
    event = chaos("sightings").EventSeen
    back = [event(119.5, site, 21, "back", "site east is back; the run goes on") for site in (1, 2)]
    verdict = chaos("verdicts").judged(seen_kill(chaos, steps=steps, back=back))
    assert verdict.misses == ()
    assert verdict.rejoin == pytest.approx(15.0)
    late = seen_kill(chaos, steps=steps, back=back, rejoin_seconds=10.0)
    assert chaos("verdicts").judged(late).misses == ("rejoin after 15 s, 10 allowed",)


def test_misses_of_seconds_are_named_apart(chaos):
    late = [lost_at(chaos, 106.0, 1, "east"), lost_at(chaos, 106.0, 2, "east")]
    seen = seen_kill(chaos, lost=late, members_back=False)
    verdict = chaos("verdicts").judged(seen)
    assert verdict.late == ("detected after 1.5 s, 1.0 allowed",)
    assert verdict.misses == ("no rejoin", *verdict.late)


def test_silence_has_the_eviction_time_and_the_site_ends_fenced(chaos):
    silent = {"outcome": "silence", "holder_is_silent": False, "over": 120.0, "codes": {0: (4,)}}
    silent["lost"] = [lost_at(chaos, 113.0, 1, "east"), lost_at(chaos, 113.0, 2, "east")]
    assert missed(chaos, **silent) == ()
    assert missed(chaos, **silent | {"codes": {0: (1,)}}) == ("east ended with code 1, not 4",)
    silent["lost"] = [lost_at(chaos, 121.0, 1, "east"), lost_at(chaos, 121.0, 2, "east")]
    assert missed(chaos, **silent) == ("detected after 16.5 s, 9.5 allowed",)
    assert missed(chaos, **silent | {"holder_is_silent": True}) == ()


def test_what_nobody_is_to_notice_loses_no_site(chaos):
    steps = {site: steps_of(chaos, site, 1, 40, 100.0) for site in range(3)}
    calm = {"outcome": "nothing", "expected": [], "lost": [], "codes": {}}
    calm |= {"steps": steps, "struck": {}}
    assert missed(chaos, **calm) == ()
    noticed = calm | {"lost": [lost_at(chaos, 106.0, 1, "east")]}
    assert "east lost instead of nobody" in missed(chaos, **noticed)
    steps[2] = steps_of(chaos, 2, 1, 40, 100.0, hole=range(8, 12))
    assert missed(chaos, **calm) == (), "its disk is full, and its lines are lost"
    steps[2] = steps_of(chaos, 2, 1, 40, 100.0, late=(8, 4.0))
    assert missed(chaos, **calm) == ("5.0 s between two steps, 3.0 allowed",)
    assert missed(chaos, **calm | {"next_step_factor": 10.0}) == ()


FAKE_SSH = """\
#!/bin/sh
shift
exec sh -c "$*"
"""
"""A remote command that runs here, whatever the host."""


class Hosted(NamedTuple):
    """Processes that stand for those of three sites, and what reaches them."""

    processes: list[subprocess.Popen]
    directories: dict[str, Path]
    ssh: list[str]
    config: RunConfig

    def run(self, chaos, **hosts):
        named = dict.fromkeys(self.directories, "here") | hosts
        return chaos("hosted_run").HostedRun(self.config, named, self.directories, self.ssh)


@pytest.fixture
def hosted(tmp_path):
    script = tmp_path / "fake_ssh"
    script.write_text(FAKE_SSH)
    islands = {"on_loss": "go_on", "lease": {"path": str(tmp_path / "membership.json")}}
    dc = {"join": "islands"}
    path = write_config(tmp_path / "run.yaml", tmp_path, dc=dc, islands=islands)
    processes, directories = [], {}
    for site in NAMES:
        variables = {"GEOJAX_SITE": site, "GEOJAX_ISLANDS": ",".join(NAMES), "GEOJAX_KEY": "secret"}
        variables["GEOJAX_HEARTBEAT_TIMEOUT"] = "7"
        processes.append(subprocess.Popen(["sleep", "600"], env=os.environ | variables))
        directories[site] = tmp_path / site
        (folder := tmp_path / site / site).mkdir(parents=True)
        place = f"process {processes[-1].pid} on {socket.gethostname()}\n"
        (folder / "lock").write_text(place)
    yield Hosted(processes, directories, ["sh", str(script)], RunConfig.load(path))
    for process in processes:
        process.kill()
        process.wait()


def state_of(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_signals_come_to_the_first_process_of_a_site_on_its_host(chaos, hosted):
    run = hosted.run(chaos)
    assert run.sites == NAMES
    assert run.lease_seconds == 7.0
    with chaos("hosted_run").watched(run):
        before = time.time()
        assert before - 0.1 < run.send(1, signal.SIGSTOP) < time.time() + 0.1
        wait_until(lambda: state_of(hosted.processes[1]) == "T")
        run.resume(1)
        wait_until(lambda: state_of(hosted.processes[1]) == "S")
        run.send(2, signal.SIGSTOP)
        run.strike(0, 5, signal.SIGKILL)
    assert hosted.processes[0].wait() == -signal.SIGKILL
    wait_until(lambda: state_of(hosted.processes[2]) == "S", "the end lets go on what stands still")


def test_a_process_that_is_not_that_of_the_site_is_left_alone(chaos, hosted):
    run = hosted.run(chaos)
    locks = [hosted.directories[site] / site / "lock" for site in NAMES]
    locks[0].write_text(locks[1].read_text())
    with pytest.raises(UserError, match="site east: here has no process"):
        run.strike(0, 1, signal.SIGKILL)
    locks[0].write_text("process 1 on another-host\n")
    with pytest.raises(UserError, match="its process is on another-host, which here is not"):
        run.strike(0, 1, signal.SIGKILL)
    locks[0].unlink()
    with pytest.raises(UserError, match="--runs east=DIRECTORY"):
        run.strike(0, 1, signal.SIGKILL)
    assert all(process.poll() is None for process in hosted.processes)


def test_sites_of_hosts_are_those_of_the_run(chaos, hosted):
    del hosted.directories["mid"]
    with pytest.raises(UserError, match="has the sites east, mid, west; give a host of each"):
        hosted.run(chaos)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--hosts", "east=a", "west=b"), "--hosts needs the run's config"),
        (("{config}", "--hosts", "east"), "'east' must be SITE=VALUE"),
        (
            ("{config}", "--hosts", "east=a", "west=b", "--kinds", "kill", "cut_pair"),
            "--kinds: cut_pair is more than a signal; --hosts has kill, kill_first",
        ),
        (("{config}", "--runs", "east=a"), "--runs and --undisturbed are for --hosts"),
    ],
)
def test_wrong_arguments_end_the_command_with_a_line(
    arguments, reason, chaos, monkeypatch, capsys, tmp_path
):
    config = tmp_path / "run.yaml"
    config.write_text("{}")
    words = [argument.format(config=config) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["chaos.py", *words])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("chaos").parsed()
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_percentiles_are_values_that_were_measured(chaos):
    percentiles = chaos("chaos_report").percentiles
    assert percentiles([]) is None
    assert percentiles([2.0]) == {"p50": 2.0, "p95": 2.0, "max": 2.0}
    found = percentiles([float(value) for value in range(1, 101)])
    assert found == {"p50": 50.5, "p95": 95.0, "max": 100.0}
