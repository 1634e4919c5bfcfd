"""Under an FP8 recipe, too, every layout gives the loss and the gradients of one device."""

import dataclasses
import functools
import math

import jax
import pytest
from support.equality import assert_equal_gradients, gradients_of_step
from support.plans import step_plan_on
from support.small_models import SEQUENCE, drawn_parameters, make_batch

from geojax import make_mesh
from geojax.hlo import collective_traffic
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.precision import RECIPES, policy
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import state_layouts

ROWS = 8
SEQUENCE_PARALLEL = {"sequence_parallel": True}


def model_of(mixture, key_value_heads=2):
    """Whose parts on two ranks are whole blocks of 32 numbers."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_bias": True,
        "use_attention_sinks": True,
    }
    return ModelConfig(
        num_hidden_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        head_dim=32,
        num_key_value_heads=key_value_heads,
        intermediate_size=64,
        vocab_size=61,
        max_position_embeddings=64,
        norm="rmsnorm",
        hidden_act="silu",
        **(experts if mixture else {}),
    )


def recipe_of(name):
    """The policy that computes in float64 what is not FP8: two sums of the same numbers in another
    order round to the same FP8 numbers, but for one in 10^12 or so."""
    return dataclasses.replace(policy("fp64"), recipe=RECIPES[name])


def gradients(recipe, model, axes, microbatches=1, **options):
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    plan = step_plan_on(mesh, recipe_of(recipe), microbatches, **options)
    parameters = drawn_parameters(model, plan.policy.master_dtype)
    return gradients_of_step(model, parameters, make_batch(model, rows=ROWS), None, plan)


@functools.cache
def alone(recipe, model, tensors):
    """One device, whose microbatches have as many rows as one rank's have on a layout."""
    loss, gradient = gradients(recipe, model, {"data": 1}, tensors)
    return loss, jax.device_get(gradient)


def check(layout, model, tolerance=1e-10):
    recipe, axes, microbatches, tensors, options = layout
    with jax.enable_x64(True):
        expected_loss, expected = alone(recipe, model, tensors)
        loss, actual = gradients(recipe, model, axes, microbatches, **options)
        assert abs(float(loss) - float(expected_loss)) <= 1e-10 * float(expected_loss)
        assert_equal_gradients(actual, expected, tolerance)


def test_ranks_that_slice_one_head_have_the_scale_of_the_whole_kernel():
    # The loss is the same. Of the head's gradient each rank makes a part and rounds it.
    layout = ("current", {"tensor": 2}, 1, 1, {"remat": "full"})
    check(layout, model_of(mixture=False, key_value_heads=1), tolerance=0.1)


@pytest.mark.parametrize(
    ("recipe", "axes", "groups", "options", "tolerance"),
    [
        # All rows of an expert are one tensor, from whichever ranks they come. The experts'
        # scales are gathered in the site, the shards over sites before them.
        ("current", {"dc": 2, "data": 2, "tensor": 2}, 4, {"shard_across_sites": True}, 1e-10),
        # In another order of the rows the kernels' gradients have blocks of others.
        ("mxfp8", {"expert": 2, "tensor": 2}, 1, SEQUENCE_PARALLEL, 1e-3),
    ],
)
def test_experts_have_their_own_scales_wherever_they_are(recipe, axes, groups, options, tolerance):
    check((recipe, axes, 1, groups, options), model_of(mixture=True), tolerance)


def test_magnitudes_of_current_scaling_travel_inside_the_site():
    model, axes = model_of(mixture=False), {"dc": 2, "context": 2, "tensor": 2}
    settings = OptimizerSettings()
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    traffic = {}
    for name in ("bf16", "fp8-current"):
        plan = step_plan_on(make_mesh(**axes), policy(name))
        layouts = state_layouts(model, optimizer, plan)
        batch = batch_shape(ROWS, SEQUENCE)
        lowered = lower_step(layouts, model, plan, optimizer, schedule, batch)
        traffic[name] = collective_traffic(lowered, plan.mesh)
    plain, scaled = traffic["bf16"], traffic["fp8-current"]
    assert scaled.bytes_over("dc") == plain.bytes_over("dc")
    assert len(scaled.over("dc")) == len(plain.over("dc"))
    for axis in ("tensor", "context"):
        added = scaled.bytes_over(axis) - plain.bytes_over(axis)
        assert 0 < added < 2**12, "numbers, not tensors"
