"""The bytes of the pieces of a step, from one abstract trace of each: a layer, head and embedding.

Experts, latent attention and layers that a user wrote need no formula: what a layer keeps of a
microbatch, and what its backward needs while it runs, are read off its trace. No loop over layers
or microbatches is traced, and no device is touched.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from geojax.collectives.axes import zeros_of
from geojax.models import AnyModel, OwnModel
from geojax.models.attention.workspace import workspace_bytes
from geojax.models.chunk.layer_io import layer_slice
from geojax.models.chunk.layer_scan import forward_layer
from geojax.models.frozen import trained_part
from geojax.models.parameters import declarations
from geojax.models.transformer import read_by_head
from geojax.pipeline.schedule import LayerBytes
from geojax.planner.cost.held_bytes import held_bytes
from geojax.planner.memory_phases import StepPieces
from geojax.planner.workspace import peak_bytes
from geojax.runtime.platform import platform_of
from geojax.sharding import leaf_layouts
from geojax.step.amax_history import history_layouts, prev_amax
from geojax.step.forward_backward import ForwardBackward
from geojax.step.gather import stage_weights, step_weights, without_layers
from geojax.step.gradients import split_microbatches
from geojax.step.plan import StepPlan
from geojax.step.program import batch_on_mesh, batch_specs
from geojax.step.state import parameter_layouts


def step_pieces(
    model: AnyModel, plan: StepPlan, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> StepPieces:
    """Trace the pieces of a step on the plan's mesh, whose devices need not exist.

    Args:
        model: the model.
        plan: how the step runs.
        batch: the global batch as shapes.
    """
    found: list[StepPieces] = []
    layouts = parameter_layouts(model, plan), history_layouts(model, plan)
    dropout_key = jax.random.key(0) if model.is_random else None
    run = ForwardBackward(model, plan, dropout_key)

    def trace(state: tuple[Any, Any], sequences: Any) -> jax.Array:
        weights, history = state
        amax = prev_amax(history, plan)
        zero = jnp.int32(0)
        if plan.staged_layers is not None:  # stages see other microbatches at a time
            zero = lax.axis_index(plan.stage_axes) * 0
        microbatch = layer_slice(split_microbatches(sequences, plan), zero)
        if plan.staged_layers is not None:
            of_stage = stage_weights(weights, layouts[0], plan, amax)
            layer, others = layer_slice(of_stage["layers"], 0), of_stage
        else:
            made = step_weights(weights, layouts[0], model, plan, amax)
            first = made.layers[0]
            layer, _ = first.source.take(first.prefetched, zero, zero)
            others = made.non_layer_params
        found.append(_of_rank(run, layer, zero, without_layers(others), microbatch))
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


def _of_rank(
    run: ForwardBackward, layer: Any, number: jax.Array, others: Any, microbatch: Any
) -> StepPieces:
    """Trace the pieces on one rank, inside the `shard_map`; the layer has this number."""
    functions = run.whole_model.functions
    context = functions.context(microbatch)
    x, embedding = functions.embed_forward(others["embedding"], microbatch)
    again = (layer, number, context)
    cotangents, residuals = forward_layer(functions.layer, x, again)
    backward = _trace(
        lambda saved, again, made: dataclasses.replace(residuals, saved=saved).backward(
            made, again
        ),
        residuals.saved,
        again,
        cotangents,
    )
    last = read_by_head(others, run.model)
    head = run.shared_ends or functions
    of_head = _trace(head.head_gradients, last, cotangents[0], microbatch)
    policy, in_place = run.plan.policy, 0
    if run.plan.staged_layers is not None and functions.embed_sums is not None:
        sums = zeros_of(trained_part(others["embedding"]), dtype=policy.reduce_dtype)
        of_embedding = _trace(functions.embed_sums, others["embedding"], microbatch, x, sums)
        in_place = _bytes(sums)
    else:
        of_embedding = _trace(
            lambda saved, first, made, batch: functions.embed_gradients(
                first, dataclasses.replace(embedding, saved=saved), made, batch
            ),
            embedding.saved,
            others["embedding"],
            x,
            microbatch,
        )
    # Without ZeRO the weights of the state are computed with, where they are in the same dtype.
    copies = run.plan.layout.zero.stage > 0 or policy.compute_dtype != policy.master_dtype
    return StepPieces(
        non_layer_weights=_bytes(others) if copies else 0,
        layer_weights=_bytes(layer) if copies else 0,
        expert_weights=_bytes({name: layer[name] for name in _experts(run.model)}),
        held=_held(run.plan, residuals, again, cotangents),
        stream=_bytes(x),
        layer_backward=peak_bytes(backward),
        layer_gradient=_result_bytes(backward) - _bytes(x),
        attention=_attention(run, microbatch["tokens"].shape),
        head=peak_bytes(of_head),
        head_gradient=_result_bytes(of_head) - _bytes(x),
        embedding_held=_bytes(embedding.saved),
        embedding_backward=peak_bytes(of_embedding) - in_place,
    )


def _experts(model: AnyModel) -> set[str]:
    """Name what a layer has on the axis `expert`."""
    declared = jax.tree_util.tree_leaves_with_path(declarations(model)["layers"])
    return {path[0].key for path, leaf in declared if "expert" in leaf.axes}


def _held(plan: StepPlan, residuals: Any, again: Any, cotangents: Any) -> LayerBytes:
    """Return the bytes that a layer holds between its passes."""
    splits = plan.tick_program is not None and plan.tick_program.ticks.schedule.split_backward
    return held_bytes(residuals, again, cotangents, split=splits)


def _attention(run: ForwardBackward, shape: tuple[int, ...]) -> int:
    """Return what attention's kernel needs for a rank's tokens [B, S]."""
    model, tensor = run.model, run.plan.mesh.shape["tensor"]
    if isinstance(model, OwnModel):
        return 0
    return workspace_bytes(
        run.plan.policy.compute_dtype,
        (*shape, model.num_attention_heads // tensor, model.head_dim),
        (*shape, max(model.num_key_value_heads // tensor, 1), model.v_head_dim),
        softcap=model.attn_logit_softcapping is not None,
        platform=platform_of(run.plan.mesh).name,
    )


def _trace(function: Any, *arguments: Any) -> Any:
    return jax.make_jaxpr(function)(*arguments)


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _result_bytes(program: Any) -> int:
    return _bytes(list(program.out_avals))
