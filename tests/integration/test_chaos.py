"""Six faults of a run of three sites, as `benchmarks/chaos.py` puts them in: all are recovered.

Some come as with `--hosts`, by a remote command that runs here.
"""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from support.full_disk import SmallDisk, small_disk
from support.island_jobs import SETTINGS
from support.small_runs import TIMEOUT, write_config

from geojax.config.run_config import RunConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from chaos_faults.campaign import Campaign
from chaos_faults.drawn_faults import KINDS, drawn_faults
from chaos_faults.hosted_run import HostedRun
from chaos_faults.injections import Injector
from chaos_faults.loopback_sites import loopback_sites
from chaos_faults.sightings import Sightings
from chaos_faults.supervised_run import SITES, SupervisedRun, started

FAULTS = ("short_pause", "resets", "kill_first", "full_disk", "kill_in_save", "short_pause")
NEED_ROOT = {"resets", "full_disk"}
BY_REMOTE_COMMAND = {"short_pause", "kill_first"}
STEPS_BEFORE = 2
LEASE_SECONDS = 6.0
PAUSE = 0.2
"""Part of that for which a site stands still and nobody takes it out."""
SAVE_INTERVAL = 20
MODEL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 301,
    "max_position_embeddings": 32,
}
"""Half of a start is the tracing of layers and microbatches, of which one is enough here."""


@pytest.fixture
def disks(tmp_path):
    """A disk of each site; one of root's can be filled."""
    with contextlib.ExitStack() as stack:
        folders = [tmp_path / f"{site}-disk" for site in SITES]
        yield [stack.enter_context(small_disk(folder)) or SmallDisk(folder) for folder in folders]


def test_a_run_recovers_from_faults_of_its_sites(corpus, disks, tmp_path):
    islands = {"on_loss": "go_on", "lease": {"path": str(tmp_path / "membership.json")}}
    settings = SETTINGS | {
        "steps": 100_000,
        "simulate_devices": 1,
        "mesh": {"dc": 3},
        "model": MODEL,
        "batch": {"global_batch_size": 24, "sequence_length": 32, "microbatches": 1},
        "evaluation": {"interval": 100_000, "sequences": 12},
        "checkpoint": {"interval": SAVE_INTERVAL},
    }
    config = write_config(tmp_path / "run.yaml", corpus, **settings | {"islands": islands})
    network = loopback_sites(len(SITES))
    run = SupervisedRun(tmp_path, config, disks, network, None, LEASE_SECONDS, SAVE_INTERVAL)
    with started(run), Sightings(run.written) as sightings:

        def campaign_of(watched_run):
            return Campaign(watched_run, sightings, Injector(watched_run, sightings, 0.0), TIMEOUT)

        here = campaign_of(run)
        assert here.begin(calm_seconds=0.1), "".join(map(str, run.logs))
        remote_command = tmp_path / "remote"
        remote_command.write_text('shift\nexec sh -c "$*"\n')
        hosts = dict.fromkeys(SITES, "any")
        directories = dict(zip(SITES, run.runs, strict=True))
        ssh = ["sh", str(remote_command)]
        hosted = campaign_of(HostedRun(RunConfig.load(config), hosts, directories, ssh))
        for kind in FAULTS:
            if kind in NEED_ROOT and os.geteuid():
                continue
            (fault,) = drawn_faults(1, 0, len(SITES), [kind])
            campaign = hosted if kind in BY_REMOTE_COMMAND else here
            trial = campaign.put(fault._replace(share=PAUSE, steps_before=STEPS_BEFORE))
            verdict = trial.verdict
            logs = {site: run.log_since(number, 0)[-3000:] for number, site in enumerate(SITES)}
            assert not trial.rebuilt, (trial, logs)
            assert set(verdict.lost) == set(trial.injected.struck), (trial, logs)
            assert verdict.lost_steps == 0, (trial, logs)
            if KINDS[kind].outcome != "nothing":
                assert verdict.rejoin is not None, (trial, logs)
    assert sightings.conflicts == []
