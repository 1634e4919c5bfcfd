"""Two sites without a common file system train, are killed, and go on with the same bits."""

import signal

import pytest
from support.ports import free_port
from support.small_runs import (
    checkpoint_folders,
    finish,
    losses,
    start,
    wait_for,
    write_config,
)

SITES = ("east", "west")
ROLES = {
    "data": {},
    "stage": {
        "dc": {"role": "stage"},
        "batch": {"global_batch_size": 24, "sequence_length": 32, "microbatches": 3},
    },
}


def start_sites(config, folder, *arguments):
    """One process for each site, with a run directory of its own."""
    coordinator = f"127.0.0.1:{free_port()}"
    return [
        start(
            config,
            "--run_directory",
            str(folder / site),
            *arguments,
            GEOJAX_COORDINATOR=coordinator,
            GEOJAX_PROCESS_COUNT="2",
            GEOJAX_PROCESS_ID=str(process),
            GEOJAX_SITE=site,
        )
        for process, site in enumerate(SITES)
    ]


def ended_well(processes):
    printed = finish(*processes)
    assert [process.returncode for process in processes] == [0, 0], "".join(printed)
    return printed[0]


@pytest.mark.parametrize("role", ROLES)
def test_killed_sites_go_on_from_their_own_checkpoints(tmp_path, corpus, role):
    settings = {"steps": 24, "checkpoint": {"interval": 4, "keep": 2}, **ROLES[role]}
    config = write_config(
        tmp_path / "run.yaml", corpus, simulate_devices=2, mesh={"dc": 2, "data": 2}, **settings
    )
    ended_well(start_sites(config, tmp_path / "whole"))

    killed = tmp_path / "killed"
    processes = start_sites(config, killed)
    wait_for(lambda: len(checkpoint_folders(killed / "west")) > 1, processes[1])
    for process in processes:
        process.send_signal(signal.SIGKILL)
    finish(*processes)
    for site in SITES:
        folders = {folder.parent.name for folder in checkpoint_folders(killed / site)}
        assert folders == {site}, "each site has saved its own part, and no other"
    assert not (killed / "west" / "metrics.jsonl").exists(), "process 0 alone writes metrics"
    printed = ended_well(start_sites(config, killed, "--resume"))
    assert "resuming from step" in printed
    assert "another layout" not in printed, "nothing of the checkpoint crosses"
    assert losses(killed / "east") == losses(tmp_path / "whole" / "east")
