"""Every shipped config of two sites fits into the memory that its accelerators leave to a step."""

from pathlib import Path

import pytest

from geojax.topology import Topology
from geojax.train.config import RunConfig
from geojax.train.preflight import judge
from geojax.train.traced_run import accelerator_of_run, trace_run

CONFIGS = Path(__file__).parents[3] / "configs"
TWO_SITES = sorted(path.stem for path in CONFIGS.glob("*-2x*.yaml"))
"""Whole runs on accelerators; the rest of the folder runs on simulated devices."""


def test_they_are_those_of_both_roles():
    roles = {name: RunConfig.load(CONFIGS / f"{name}.yaml").dc.role for name in TWO_SITES}
    for model in ("llama3-70b", "nemotron4-340b"):
        assert {roles[name] for name in roles if name.startswith(model)} == {"data", "stage"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*TWO_SITES, "quickstart"}


@pytest.mark.parametrize("name", TWO_SITES)
def test_a_shipped_run_fits(name):
    config = RunConfig.load(CONFIGS / f"{name}.yaml")
    verdict = judge(config, trace_run(config).memory(), accelerator_of_run(config), {})
    assert verdict.kind == "fits", verdict.line


@pytest.mark.parametrize("name", TWO_SITES)
def test_its_mesh_takes_every_accelerator_of_its_topology(name):
    config = RunConfig.load(CONFIGS / f"{name}.yaml")
    topology = Topology.load(config.topology)
    assert config.mesh.devices == topology.accelerators
    assert config.mesh.dc == len(topology.sites)
    per_site = config.mesh.devices // config.mesh.dc
    assert name.split("-2x")[1].split("-")[0] == str(per_site)
    assert config.run_directory == Path("runs") / name
