"""Every shipped config of two sites fits into the memory that its accelerators leave to a step."""

import functools
from pathlib import Path

import pytest

from geojax.config.run_config import RunConfig
from geojax.planner.cost.memory import layout_memory
from geojax.planner.resolve.preflight import judge
from geojax.planner.resolve.run_layout import layout_of_run
from geojax.planner.resolve.traced_run import accelerator_of_run, trace_run
from geojax.topology import Topology

CONFIGS = Path(__file__).parents[3] / "configs"
TWO_SITES = sorted(path.stem for path in CONFIGS.glob("*-2x*.yaml"))
"""Whole runs on accelerators; the rest of the folder runs on simulated devices."""


@functools.cache
def traced(name):
    return trace_run(RunConfig.load(CONFIGS / f"{name}.yaml"))


def test_they_are_those_of_both_roles():
    roles = {name: RunConfig.load(CONFIGS / f"{name}.yaml").dc.role for name in TWO_SITES}
    for model in ("llama3-70b", "nemotron4-340b"):
        assert {roles[name] for name in roles if name.startswith(model)} == {"data", "stage"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*TWO_SITES, "quickstart"}


@pytest.mark.parametrize("name", TWO_SITES)
def test_a_shipped_run_fits(name):
    config = RunConfig.load(CONFIGS / f"{name}.yaml")
    verdict = judge(config, traced(name).memory, accelerator_of_run(config), {})
    assert verdict.kind == "fits", verdict.line


@pytest.mark.parametrize("name", TWO_SITES)
def test_its_memory_in_closed_form_is_within_a_tenth_of_the_trace(name):
    config, step = RunConfig.load(CONFIGS / f"{name}.yaml"), traced(name)
    layout = layout_of_run(config).changed(
        communication={
            "overlap_grad_reduce": step.plan.overlap_grad_reduce,
            "bucket_layers": step.plan.bucket_layers,
        }
    )
    assert layout.devices == config.mesh.devices
    assert layout.batch.global_batch_size == config.batch.global_batch_size
    estimate = layout_memory(config.model, layout)
    assert estimate.bytes == pytest.approx(step.memory.bytes, rel=0.1)


@pytest.mark.parametrize("name", TWO_SITES)
def test_its_mesh_takes_every_accelerator_of_its_topology(name):
    config = RunConfig.load(CONFIGS / f"{name}.yaml")
    topology = Topology.load(config.topology)
    assert config.mesh.devices == topology.accelerators
    assert config.mesh.dc == len(topology.sites)
    per_site = config.mesh.devices // config.mesh.dc
    assert name.split("-2x")[1].split("-")[0] == str(per_site)
    assert config.run_directory == Path("runs").resolve() / name
