"""A plan's config trains as it is."""

import subprocess
import sys

import yaml
from support.small_runs import TIMEOUT, environment, losses, train, write_config

SITES = """
sites:
  - &site
    name: east
    hosts: 1
    accelerators_per_host: 4
    accelerator:
      name: simulated
      peak_flops_per_second: {float32: 50GFLOP/s}
      memory_bytes: 4MB
      memory_bytes_per_second: 10GB/s
    inside_host: {round_trip_seconds: 20us, bytes_per_second: 5GB/s}
  - {<<: *site, name: west}
links:
  - {sites: [east, west], round_trip_seconds: 21ms, bytes_per_second: 10Mbit/s}
"""


def plan(config, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "geojax", "plan", str(config), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def test_the_planned_config_trains_as_it_is(tmp_path, corpus):
    (tmp_path / "sites.yaml").write_text(SITES)
    config = write_config(
        tmp_path / "run.yaml",
        corpus,
        topology=str(tmp_path / "sites.yaml"),
        steps=2,
        mesh={"dc": 2, "data": 4},
        batch={"global_batch_size": 32, "sequence_length": 32},
    )
    best = tmp_path / "best.yaml"
    planned = plan(config, "--output", str(best))
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert planned.stderr == ""
    assert "unvalidated: no published step of these accelerators was compared" in planned.stdout
    chosen = yaml.safe_load(best.read_text())
    assert chosen["mesh"]["dc"] == 2
    trained = train(best)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert set(losses(tmp_path / "run")) == {1, 2}
