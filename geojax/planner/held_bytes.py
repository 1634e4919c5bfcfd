"""The bytes that the layers of a pipeline hold, from the types of one layer."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from geojax.models import ModelConfig
from geojax.pipeline.schedule import LayerBytes
from geojax.sharding import leaf_layouts
from geojax.step.amax_history import history_layouts, prev_amax
from geojax.step.forward_backward import ForwardBackward
from geojax.step.plan import StepPlan
from geojax.step.program import batch_on_mesh, batch_specs
from geojax.step.state import parameter_layouts
from geojax.step.weight_sources import stage_weights


def layer_bytes(
    model: ModelConfig, plan: StepPlan, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> LayerBytes:
    """Count the bytes that a layer holds of a microbatch on one device.

    Args:
        model: the model.
        plan: how the step runs, in a pipeline.
        batch: the global batch as shapes.
    """
    layouts = parameter_layouts(model, plan), history_layouts(model, plan)
    dropout_key = jax.random.key(0) if model.dropout else None
    found: list[LayerBytes] = []

    def trace(state: Any, sequences: Any) -> jax.Array:
        parameters, history = state
        weights = stage_weights(parameters, layouts[0], plan, prev_amax(history, plan))
        shape = (plan.layout.batch.microbatches, -1)
        microbatches = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), sequences)
        run = ForwardBackward(model, plan, dropout_key)
        found.append(run.pipeline_layer_bytes(weights, microbatches))
        return jnp.zeros(())

    specs = jax.tree.map(lambda leaf: leaf.spec(), layouts)
    program = jax.shard_map(
        trace,
        mesh=plan.mesh,
        in_specs=(specs, batch_specs(batch, plan)),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    jax.eval_shape(program, leaf_layouts.abstract(layouts, plan.mesh), batch_on_mesh(batch, plan))
    return found[0]
