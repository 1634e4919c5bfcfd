"""Sites with runtimes of their own train as one device does, in float64."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.islands import OneProgram, data_islands, shares, site_plans, stage_islands, step_all
from support.own_models import own_model
from support.plans import step_plan_on
from support.small_models import make_batch, model_of

from geojax import make_mesh
from geojax.models import ModelConfig
from geojax.pipeline import (
    Costs,
    Hop,
    Placement,
    geopipe,
    one_forward_one_backward,
    zero_bubble_h1,
)
from geojax.pipeline.schedule import Action, Kind, Schedule
from geojax.precision import RECIPES, policy

STEPS = 2
MOE = {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_bias": True,
    "use_attention_sinks": True,
    "scoring_func": "sigmoid",
    "use_router_bias": True,
}
close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13)


def family(name):
    if name.startswith("own model"):
        return own_model("tied", layers=6)
    if name == "four layers":
        return model_of("gpt3").model_copy(update={"num_hidden_layers": 4})
    if name != "moe":
        return model_of(name)
    return ModelConfig(**(model_of("llama").model_dump() | MOE))


@functools.cache
def alone(name):
    """Metrics of the last step on one device, and the state after it."""
    model = family(name)
    run = OneProgram(model, step_plan_on(make_mesh(devices=jax.devices()[:1]), policy("fp64")))
    batch = make_batch(model)
    metrics = [run.step(batch) for _ in range(STEPS)]
    return metrics[-1], run.whole()


def check_metrics(of_sites, wanted):
    """All sites report the same, and what one device does."""
    for own in of_sites:
        assert own["stop"] == own["save"] == len(of_sites)
        np.testing.assert_equal(own, of_sites[0])
    for name in set(wanted) - {"stop", "save"}:
        np.testing.assert_allclose(of_sites[0][name], wanted[name], rtol=1e-10, err_msg=name)


DATA_CASES = {
    # Dropout, a tied table and learned positions; accumulation; a chunk of one and one of two.
    "gpt3": (2, {"data": 2, "tensor": 2}, {"chunks": 2, "held": 2}, {"microbatches": 3}),
    "moe": (2, {"data": 2, "expert": 2}, {"chunks": 3, "held": 1}, {"zero_stage": 2}),
    "llama": (3, {"data": 2}, {"chunks": 3, "held": 2}, {"microbatches": 2, "zero_stage": 2}),
    # Weights that every pass gathers for itself; a chunk of two layers, where one is ahead.
    "llama, ZeRO 3": (
        2,
        {"data": 2, "tensor": 2},
        {"chunks": 2, "held": 2},
        {"microbatches": 2, "zero_stage": 3},
    ),
    # Each gradient comes once and is written, not added.
    "llama, one microbatch": (2, {"data": 1}, {"chunks": 2, "held": 1}, {}),
    # Each layer by itself, as in programs for GPUs.
    "moe, unrolled": (
        2,
        {"data": 2},
        {"chunks": 2, "held": 2},
        {"microbatches": 2, "scan_layers": False},
    ),
}


@pytest.mark.parametrize("case", DATA_CASES)
def test_role_data_equals_one_device_and_sites_are_equal_to_the_bit(case):
    sites, axes, order, options = DATA_CASES[case]
    name, _, _ = case.partition(",")
    with jax.enable_x64(True):
        wanted, state = alone(name)
        model = family(name)
        islands = data_islands(model, site_plans(sites, axes, **options), **order)
        batches = shares(make_batch(model), sites)
        for _ in range(STEPS):
            metrics = step_all(islands, batches)
        check_metrics(metrics, wanted)
        first, *others = (island.whole() for island in islands)
        for other in others:
            jax.tree.map(np.testing.assert_array_equal, other, first)
        jax.tree.map(close, first, state)


@pytest.mark.parametrize("form", [{"zero_stage": 1}, {"zero_stage": 3}, {"scan_layers": False}])
def test_fp8_with_a_history_of_each_site_equals_one_program_with_the_same_sites(form):
    sites, axes = 2, {"data": 2}
    with jax.enable_x64(True):
        model = family("llama")
        recipe = RECIPES["delayed"]
        own = dataclasses.replace(policy("fp64"), recipe=recipe)
        mesh = make_mesh(devices=jax.devices()[:4], dc=sites, **axes)
        options = {"microbatches": 2} | form
        together = OneProgram(model, step_plan_on(mesh, own, **options))
        plans = [
            dataclasses.replace(plan, policy=own) for plan in site_plans(sites, axes, **options)
        ]
        islands = data_islands(model, plans, chunks=2, held=2)
        batch = make_batch(model)
        for _ in range(STEPS):
            wanted = together.step(batch)
            metrics = step_all(islands, shares(batch, sites))
        check_metrics(metrics, {name: wanted[name] for name in ("loss", "gradient_norm")})
        state = together.whole()
        for site, island in enumerate(islands):
            mine = island.whole()
            jax.tree.map(close, mine.parameters, state.parameters)
            of_site = jax.tree.map(lambda leaf, n=site: leaf[:, n : n + 1], state.amax_history)
            jax.tree.map(close, mine.amax_history, of_site)


def back_and_forth(microbatches):
    """Three chunks on two sites, the first and the last of them on the first site."""
    placement = Placement(2, (0, 1, 0))

    def actions(kind, chunk):
        return [Action(kind, microbatch, chunk) for microbatch in range(microbatches)]

    forward, backward = Kind.FORWARD, Kind.BACKWARD
    ends = [
        *actions(forward, 0),
        *actions(forward, 2),
        *actions(backward, 2),
        *actions(backward, 0),
    ]
    middle = [*actions(forward, 1), *actions(backward, 1)]
    return Schedule("back and forth", placement, microbatches, False, (tuple(ends), tuple(middle)))


FAR = Costs.uniform(4, 1.0, 2.0, hop=Hop(1.0))

STAGE_CASES = {
    # A table that two sites hold; dropout.
    "gpt3": (one_forward_one_backward(3, 2), 1, {"data": 2}, {}),
    # A split backward; an untied head.
    "nemotron": (zero_bubble_h1(2, 3), 1, {"data": 2, "tensor": 2}, {}),
    "moe": (back_and_forth(2), 1, {"data": 2, "expert": 2}, {}),
    # Two stages in each of two sites, which run ahead; a table that the first and the last hold.
    "four layers": (geopipe(6, FAR), 2, {"data": 2}, {}),
    # A head of anybody's that is tied to the embedding, on another site and on the same.
    "own model": (one_forward_one_backward(3, 2), 1, {"data": 2}, {}),
    "own model, both ends on a site": (back_and_forth(2), 1, {"data": 1}, {}),
    # Each layer by itself, in both halves of a split backward.
    "llama": (zero_bubble_h1(2, 3), 1, {"data": 2}, {"scan_layers": False}),
}


@pytest.mark.parametrize("case", STAGE_CASES)
def test_role_stage_equals_one_device(case):
    schedule, stages_per_site, axes, options = STAGE_CASES[case]
    stages = schedule.placement.stages
    with jax.enable_x64(True):
        wanted, state = alone(case)
        model = family(case)
        plans = site_plans(stages, axes, microbatches=schedule.microbatches, **options)
        islands = stage_islands(model, plans, schedule, stages_per_site)
        batch = make_batch(model)
        for _ in range(STEPS):
            metrics = step_all(islands, [batch] * stages)
        check_metrics(metrics, wanted)
        for island in islands:
            part = island.walk.programs.part
            own = island.whole()
            jax.tree.map(close, own.parameters, part.held(state.parameters))
            moments = [
                each
                for each in jax.tree.leaves(own.optimizer, is_leaf=is_parameters)
                if is_parameters(each)
            ]
            of_device = [
                each
                for each in jax.tree.leaves(state.optimizer, is_leaf=is_parameters)
                if is_parameters(each)
            ]
            assert len(moments) == 2
            for mine, whole in zip(moments, of_device, strict=True):
                jax.tree.map(close, mine, part.held(whole))


def test_fp8_of_stages_equals_one_program():
    with jax.enable_x64(True):
        model, own = family("llama"), dataclasses.replace(policy("fp64"), recipe=RECIPES["delayed"])
        mesh = make_mesh(devices=jax.devices()[:2], data=2)
        together = OneProgram(model, step_plan_on(mesh, own, microbatches=2))
        plans = [
            dataclasses.replace(plan, policy=own)
            for plan in site_plans(2, {"data": 2}, microbatches=2)
        ]
        islands = stage_islands(model, plans, back_and_forth(2))
        batch = make_batch(model)
        for _ in range(STEPS):
            wanted = together.step(batch)
            metrics = step_all(islands, [batch] * 2)
        check_metrics(metrics, {name: wanted[name] for name in ("loss", "gradient_norm")})
        state = together.whole()
        for island in islands:
            part, mine = island.walk.programs.part, island.whole()
            jax.tree.map(close, mine.parameters, part.held(state.parameters))
            numbers = [layer for own in part.chunks.values() for layer in own]
            of_part = jax.tree.map(lambda leaf, at=numbers: leaf[at], state.amax_history)
            jax.tree.map(close, mine.amax_history, of_part)


def is_parameters(tree):
    return isinstance(tree, dict) and "layers" in tree
