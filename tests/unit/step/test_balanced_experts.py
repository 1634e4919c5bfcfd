"""The bias of balanced experts in steps of mixed precision."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from support.drawn_layouts import Draw
from support.plans import step_plan_on

from geojax import make_mesh
from geojax.inference.loaded_model import weight_layouts
from geojax.precision import policy
from geojax.step.gather import gather_layers
from geojax.step.state import parameter_layouts
from geojax.train.whole_weights import gather_full_params

MODEL = Draw("deepseek", "balanced", 8, 0.0, (), 1, ()).model()


def test_a_step_in_bf16_chooses_experts_by_the_biases_that_it_stores():
    plan = step_plan_on(make_mesh(devices=jax.devices()[:1]), policy("bf16"))
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
