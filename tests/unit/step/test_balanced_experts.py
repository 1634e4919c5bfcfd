"""Latent attention, first dense layers and balanced experts in a pipeline, and their bias in steps.

Other layouts are among those drawn in `test_drawn_layouts`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from support.drawn_layouts import ROWS, SEQUENCE, Draw
from support.equality import assert_equal_gradients, gradients_of_step
from support.small_models import drawn_parameters, make_batch

from geojax import make_mesh
from geojax.inference.loaded_model import weight_layouts
from geojax.models import loss_sum
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import policy
from geojax.step.plan import StepPlan
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import parameter_layouts
from geojax.step.weight_sources import gather_layers
from geojax.train.sample import gather_full_params

MODEL = Draw("deepseek", "balanced", 8, 0.0, (), 1, ()).model()


def test_a_pipeline_with_split_backwards_gives_the_gradients_of_one_device():
    placement = Placement.linear(2)
    table = tick_table("zero_bubble_h1", placement, 2, [1])
    plan = StepPlan(
        make_mesh(devices=jax.devices()[:4], stage=2, tensor=2),
        policy("fp64"),
        2,
        sequence_parallel=True,
        staged_layers=StagedLayers(placement, (1, 1)),
        tick_program=TickProgram.of(table, branch_free=False),
    )
    with jax.enable_x64(True):
        parameters = drawn_parameters(MODEL, policy("fp64").master_dtype)
        batch = make_batch(MODEL, rows=ROWS, sequence=SEQUENCE)
        total = functools.partial(loss_sum, batch=batch, config=MODEL)
        both = jax.jit(jax.value_and_grad(total, has_aux=True))
        (loss, count), expected = both(parameters)
        actual_loss, actual = gradients_of_step(MODEL, parameters, batch, None, plan)
        assert abs(float(actual_loss) - float(loss / count)) <= 1e-10 * abs(float(loss / count))
        assert_equal_gradients(
            actual, jax.tree.map(lambda leaf: np.asarray(leaf / count), expected), 1e-10
        )


def test_a_step_in_bf16_chooses_experts_by_the_biases_that_it_stores():
    plan = StepPlan(make_mesh(devices=jax.devices()[:1]), policy("bf16"))
    layouts = parameter_layouts(MODEL, plan)["layers"]["router"]
    stored = jax.tree.map(
        lambda leaf: 1 + 1e-3 * jnp.arange(8, dtype=leaf.dtype) * jnp.ones(leaf.shape), layouts
    )
    program = jax.shard_map(
        lambda shards: gather_layers(shards, layouts, plan, None, quantized=False),
        mesh=plan.mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(plan.batch_axes),
    )
    gathered = program(stored)
    sampled = gather_full_params(stored, layouts, plan)
    for made in (gathered, sampled):
        assert made["kernel"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(made["score_bias"], stored["score_bias"])
    served = weight_layouts(MODEL, plan.mesh, "bfloat16")["layers"]["router"]
    assert {name: leaf.dtype for name, leaf in served.items()} == {
        "kernel": jnp.bfloat16,
        "score_bias": jnp.float32,
    }
