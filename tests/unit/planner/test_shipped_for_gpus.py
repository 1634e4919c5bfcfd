"""The cheapest shipped configs for two sites, compiled for their H100s."""

import os
from pathlib import Path

import pytest
from support.h100 import needs_cuda

from geojax.config.run_config import RunConfig
from geojax.planner.compile_target import CompileTarget
from geojax.planner.resolve.planned_step import PlannedStep
from geojax.planner.resolve.traced_run import compile_run
from geojax.runtime.device_memory import usable_memory

CONFIGS = Path(__file__).parents[3] / "configs"


@needs_cuda
@pytest.mark.parametrize("name", ["llama3-8b-2x8", "llama3-70b-2x256"])
def test_a_shipped_config_compiles_and_fits(name):
    config = RunConfig.load(CONFIGS / f"{name}.yaml")
    target = CompileTarget.parse(f"h100:{config.mesh.devices}")
    step = compile_run(config, target)
    usable = usable_memory(target.accelerator, os.environ)
    assert step.memory.bytes <= usable.bytes
    assert step.estimate_ratio == pytest.approx(1, abs=0.05)
    over_dc = [each for each in step.messages if "dc" in each.axes]
    assert sum(each.bytes_sent for each in over_dc) > 2**20
    planned = PlannedStep.of(config, step.plan, step.traffic, target)
    sent = sum(float(each.bytes_sent) for each in over_dc)
    assert sent == pytest.approx(planned.bytes_between_sites, rel=0.02)
    assert sum(each.payloads for each in over_dc) == planned.messages_between_sites
    assert step.products.flops == pytest.approx(planned.product_flops, rel=0.03)
    assert step.memory.bytes == pytest.approx(planned.memory_bytes, rel=0.1)
    assert all(each.streams and "compute" not in each.streams for each in over_dc)
