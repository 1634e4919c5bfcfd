"""Three sites of which one is killed: the others go on with the same losses, to the bit."""

import os
import re
import signal

import pytest
from support.island_jobs import SETTINGS, start_sites
from support.small_runs import (
    REPOSITORY,
    environment,
    finish,
    losses,
    saved_steps,
    wait_for_step,
    write_config,
)

SITES = ("east", "mid", "west")
WRONG_CLOCK = REPOSITORY / "tests" / "support" / "wrong_clock"
STEPS = 14
THREE = SETTINGS | {
    "steps": STEPS,
    "simulate_devices": 1,
    "mesh": {"dc": 3},
    "batch": {"global_batch_size": 12, "sequence_length": 32, "microbatches": 2},
    "evaluation": {"interval": 7, "sequences": 12},
    "checkpoint": {"interval": 5},
}


def config_of(folder, corpus, **changes):
    folder.mkdir(exist_ok=True)
    islands = {"on_loss": "go_on", "lease": {"path": str(folder / "membership.json")}}
    return write_config(folder / "run.yaml", corpus, **THREE | {"islands": islands} | changes)


def figures(run):
    """Losses by step, and those of validation."""
    return losses(run), re.findall(
        r'"validation/sums": [^,}]*', (run / "metrics.jsonl").read_text()
    )


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    sites = start_sites(config_of(folder, corpus), sites=SITES)
    for process, output in zip(sites, finish(*sites), strict=True):
        assert process.returncode == 0, output
    return figures(folder / "run" / "east")


def disks(folder):
    """The run directory of each site, on a file system that no other site sees."""
    return [folder / f"disk of {site}" / "run" for site in SITES]


def kill_one(folder, corpus, killed, of_sites=()):
    """Train with three sites of which one is killed; what each of them printed."""
    config = config_of(folder, corpus)
    sites = start_sites(config, runs=disks(folder), sites=SITES, of_sites=of_sites)
    try:
        wait_for_step(disks(folder)[killed] / SITES[killed], 3, sites[killed])
    finally:
        os.kill(sites[killed].pid, signal.SIGKILL)
        outputs = finish(*sites)
    for site, (process, output) in enumerate(zip(sites, outputs, strict=True)):
        assert process.returncode == (-signal.SIGKILL if site == killed else 0), output
    return outputs


@pytest.mark.parametrize("killed", range(3), ids=SITES)
def test_the_others_go_on_with_the_same_bits_and_all_resume(killed, undisturbed, corpus, tmp_path):
    outputs, runs = kill_one(tmp_path, corpus, killed), disks(tmp_path)
    left = [site for site in range(3) if site != killed]
    lost = f"site {SITES[killed]} is lost ("
    assert any(f"{lost}it refuses connections" in outputs[site] for site in left)
    for site in left:
        assert lost in outputs[site]  # by itself, or as the other has found
        assert "(membership 2 in " in outputs[site]
        assert figures(runs[site] / SITES[site]) == undisturbed
        assert saved_steps(runs[site])[-1] == STEPS
    assert STEPS not in saved_steps(runs[killed])
    again = start_sites(config_of(tmp_path, corpus, steps=STEPS + 2), runs=runs, sites=SITES)
    taken = f"site {SITES[killed]} takes step {STEPS}, the newest of all sites, from site "
    for process, output in zip(again, finish(*again), strict=True):
        assert process.returncode == 0, output
        assert taken in output
        assert f"resuming from step {STEPS} in" in output
    trained = [losses(run / site) for run, site in zip(runs, SITES, strict=True)]
    assert all(own[STEPS + 2] == trained[0][STEPS + 2] for own in trained)


def test_clocks_that_are_wrong_change_nothing(undisturbed, corpus, tmp_path):
    path = f"{WRONG_CLOCK}:{environment()['PYTHONPATH']}"
    clocks = [
        {"PYTHONPATH": path, "WRONG_CLOCK": clock}
        for clock in ("10800 1", "-172800 1.2", "2592000 0.9")
    ]
    outputs = kill_one(tmp_path, corpus, 0, of_sites=clocks)
    for site in (1, 2):
        assert "site east is lost (" in outputs[site]
        assert figures(disks(tmp_path)[site] / SITES[site]) == undisturbed


TWO_DEVICES = {"mesh": {"dc": 3, "data": 2}}


@pytest.fixture(scope="module")
def undisturbed_on_two_devices(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two devices")
    sites = start_sites(config_of(folder, corpus, **TWO_DEVICES), sites=SITES, devices=2)
    for process, output in zip(sites, finish(*sites), strict=True):
        assert process.returncode == 0, output
    return losses(folder / "run" / "east")


@pytest.mark.parametrize("processes", [(2, 2, 2), (1, 1, 2)], ids=["all have two", "one has two"])
def test_a_site_that_loses_one_of_two_processes_is_lost_whole(
    processes, undisturbed_on_two_devices, corpus, tmp_path
):
    config = config_of(tmp_path, corpus, **TWO_DEVICES)
    sites = start_sites(config, sites=SITES, processes=processes, devices=2)
    try:
        wait_for_step(tmp_path / "run" / "west", 3, sites[-2])
    finally:
        os.kill(sites[-1].pid, signal.SIGKILL)
        outputs = finish(*sites)
    for process, output in zip(sites[:-2], outputs[:-2], strict=True):
        assert process.returncode == 0, output
    assert sites[-2].returncode != 0, outputs[-2]  # the site's other process
    for site, output in zip(SITES[:2], (outputs[0], outputs[processes[0]]), strict=True):
        assert "site west is lost (" in output
        trained = losses(tmp_path / "run" / site)
        assert trained == pytest.approx(undisturbed_on_two_devices, rel=1e-6)
