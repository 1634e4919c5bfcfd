"""Kernels travel as FP8 numbers, and a step is bit by bit that of kernels rounded on arrival."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.equality import sums_of_step
from support.plans import step_plan_on
from support.small_models import make_batch

from geojax import make_mesh
from geojax.models import ModelConfig
from geojax.precision import RECIPES, policy
from geojax.step import fp8_all_gather
from geojax.step.amax_history import history_layouts, next_history
from geojax.step.program import batch_specs, signals_on_mesh
from geojax.step.state import parameter_layouts
from geojax.step.update import mean_over_targets

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "head_dim": 32,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "norm": "rmsnorm",
    "hidden_act": "silu",
}

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
CASES = {
    # recipe, dtype of what is not FP8, axes, options, sizes of the model
    "delayed": (
        "delayed",
        "bf16",
        {"data": 2, "tensor": 2},
        {"zero_stage": 3, "microbatches": 2, "overlap_grad_reduce": True, "remat": "selective"},
        {"num_hidden_layers": 2, "num_key_value_heads": 1},
    ),
    "current": (
        "current",
        "fp64",
        {"data": 2, "expert": 2},
        {"zero_stage": 3, "reshard_after_forward": False},
        MIXTURE,
    ),
    "block": (
        "block",
        "bf16",
        {"data": 2},
        {"zero_stage": 1},
        {"num_hidden_layers": 1, "hidden_size": 256},
    ),
}


def gradients(case):
    """Loss, gradients, and the history after them, of one batch."""
    recipe, compute, axes, options, sizes = case
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    own = dataclasses.replace(policy(compute), recipe=RECIPES[recipe])
    plan = step_plan_on(mesh, own, **options)
    model = ModelConfig(**SIZES | sizes)
    layouts = parameter_layouts(model, plan)
    generator = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda place: generator.normal(size=place.padded_shape).astype(place.dtype) / 8, layouts
    )
    history = jax.tree.map(
        lambda place: generator.uniform(1, 2, place.padded_shape).astype(place.dtype),
        history_layouts(model, plan),
    )
    batch = make_batch(model, rows=4 * mesh.shape["data"])
    signals = np.zeros(signals_on_mesh(plan).shape, np.float32)

    def of_rank(shards, history, rows, signals):
        sums = sums_of_step(
            shards,
            rows,
            signals,
            layouts=layouts,
            model=model,
            plan=plan,
            amax_history=history,
        )
        mean, metrics = mean_over_targets(sums)
        return metrics["loss"], mean, next_history(history, sums.amax)

    specs, of_history = (
        jax.tree.map(lambda place: place.spec(), tree)
        for tree in (layouts, history_layouts(model, plan))
    )
    program = jax.shard_map(
        of_rank,
        mesh=mesh,
        in_specs=(specs, of_history, batch_specs(batch, plan), plan.signal_spec),
        out_specs=(PartitionSpec(), specs, of_history),
        check_vma=True,
    )
    return jax.jit(program)(parameters, history, batch, signals)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_bit_by_bit_that_of_kernels_rounded_on_arrival(name, monkeypatch):
    with jax.enable_x64(CASES[name][1] == "fp64"):
        made = gradients(CASES[name])
        monkeypatch.setattr(fp8_all_gather, "is_fp8_gathered", lambda *_: False)
        on_arrival = gradients(CASES[name])
        jax.tree.map(np.testing.assert_array_equal, made, on_arrival)
        assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(made))
