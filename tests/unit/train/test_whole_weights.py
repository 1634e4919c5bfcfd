"""Gathering the weights for a sample at the end of a run: on one device, and only if they fit."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from support import whole_state

from geojax.accelerators import accelerator_named
from geojax.config.run_config import RunConfig
from geojax.models import ModelConfig, parameter_count
from geojax.optim import make_optimizer
from geojax.planner.resolve.choices import resolved_plan
from geojax.step.config_plan import make_run_mesh
from geojax.step.state import initial_state, state_layouts
from geojax.train import whole_weights
from geojax.train.whole_weights import gather_full_params, ungathered_reason

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


@functools.cache
def run():
    """Config, plan, layouts and optimizer of a small run that shards everything."""
    config = RunConfig.load(QUICKSTART, ["--model", "tiny", "--zero.stage", "3"])
    plan = resolved_plan(config, make_run_mesh(config))
    optimizer = make_optimizer(config.optimizer, config.steps)
    return config, plan, state_layouts(config.model, optimizer, plan), optimizer


def test_the_weights_come_whole_to_one_device_leaf_by_leaf():
    config, plan, layouts, optimizer = run()
    state = initial_state(config.model, optimizer, layouts, plan, config.seed)
    weights = gather_full_params(state.parameters, layouts.parameters, plan)
    assert {leaf.sharding for leaf in jax.tree.leaves(weights)} == {
        jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    }
    whole = whole_state.trim(state, layouts, plan.mesh).parameters
    assert jax.tree.all(jax.tree.map(np.array_equal, weights, whole))


def test_other_processes_take_part_and_keep_nothing(monkeypatch):
    config, plan, layouts, optimizer = run()
    state = initial_state(config.model, optimizer, layouts, plan, config.seed)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert gather_full_params(state.parameters, layouts.parameters, plan) is None


@pytest.mark.parametrize(("model", "fits"), [("llama3-8b", True), ("llama3-70b", False)])
def test_a_model_that_one_device_cannot_hold_is_not_gathered(monkeypatch, model, fits):
    _, plan, layouts, _ = run()
    unknown = ungathered_reason(ModelConfig.load(model), layouts, plan)
    assert unknown is None, "of CPUs nothing is known"
    monkeypatch.setattr(
        whole_weights, "accelerator_of", lambda device: accelerator_named("h200-sxm")
    )
    reason = ungathered_reason(ModelConfig.load(model), layouts, plan)
    assert (reason is None) == fits
    if not fits:
        needed = parameter_count(ModelConfig.load(model)) * 4 / 1e9
        assert f"needs {needed:.3g} GB on one device, and 127 GB of an h200-sxm's 141 GB" in reason
