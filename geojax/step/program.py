"""The compiled programs of one runtime: the training step and the validation pass."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.errors import UserError
from geojax.hlo.module import parse_module
from geojax.hlo.traffic import program_text
from geojax.models import ModelConfig, parameter_shapes
from geojax.models.parameters import UNQUANTIZED
from geojax.optim import layout
from geojax.step.amax_history import prev_amax
from geojax.step.gradients import batch_loss
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.state import TrainState
from geojax.step.update import sum_in_site, sum_scalars_over_sites, train_step

_FP8_PRODUCT = 'custom_call_target="__cublas$lt$matmul$f8"'
_MATMULS_PER_LINEAR = 3
"""Matrix products of a linear layer: forwards, and two gradients."""

STEP_NAME = train_step.__name__
"""The name of the compiled step, in profiles and in the count of compilations."""


def trace_step(
    layouts: TrainState,
    model: ModelConfig,
    plan: StepPlan,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    batch: Any,
) -> jax.stages.Traced:
    """Trace the step `(state, batch, signals, seed) -> (state, metrics)`.

    The state is donated. Compiled for these shapes, it refuses others and never recompiles.

    Args:
        layouts: from `state_layouts`.
        model: the model.
        plan: how the step runs.
        optimizer: the optax chain that runs on shards.
        schedule: learning rate by update, for the metrics.
        batch: the global batch as `jax.ShapeDtypeStruct`s, without shardings.
    """
    specs = jax.tree.map(lambda leaf_layout: leaf_layout.spec(), layouts)

    step = functools.partial(
        train_step,
        layouts=layouts,
        model=model,
        plan=plan,
        optimizer=optimizer,
        schedule=schedule,
    )
    program = jax.shard_map(
        step,
        mesh=plan.mesh,
        in_specs=(specs, batch_specs(batch, plan), plan.signal_spec, PartitionSpec()),
        out_specs=(specs, PartitionSpec()),
        check_vma=True,
    )
    arguments = (
        layout.abstract(layouts, plan.mesh),
        batch_on_mesh(batch, plan),
        signals_on_mesh(plan),
        jax.ShapeDtypeStruct((), jnp.uint32, sharding=NamedSharding(plan.mesh, PartitionSpec())),
    )
    return jax.jit(program, donate_argnums=0).trace(*arguments)


def lower_step(*arguments: Any) -> jax.stages.Lowered:
    """Lower the step for the mesh's devices; arguments are those of `trace_step`."""
    return trace_step(*arguments).lower()


def trace_evaluation(
    layouts: TrainState, model: ModelConfig, plan: StepPlan, batch: Any
) -> jax.stages.Traced:
    """Trace the validation pass: `(state, batch) -> [sum of losses, number of targets]`.

    Arguments are those of `trace_step`.
    """
    specs = jax.tree.map(lambda leaf_layout: leaf_layout.spec(), layouts)

    @jax.named_scope("evaluation")
    def evaluate(state: TrainState, sequences: Any) -> jax.Array:
        sums = batch_loss(
            state.evaluated_weights,
            sequences,
            layouts=layouts.weights,
            model=model,
            plan=plan,
            prev_amax=prev_amax(state.amax_history, plan),
        )
        return sum_scalars_over_sites(sum_in_site(jnp.stack(sums)), plan)

    program = jax.shard_map(
        evaluate,
        mesh=plan.mesh,
        in_specs=(specs, batch_specs(batch, plan)),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    arguments = (layout.abstract(layouts, plan.mesh), batch_on_mesh(batch, plan))
    return jax.jit(program).trace(*arguments)


def require_fp8_products(
    programs: Sequence[jax.stages.Compiled], model: ModelConfig, plan: StepPlan
) -> None:
    """Check that each product of a layer that follows the recipe is one of cuBLASLt, in FP8.

    XLA silently multiplies in the compute dtype where cuBLASLt cannot take a product.

    Args:
        programs: a step, or all that together run a layer forwards and backwards.
        model: the model.
        plan: how they compute.

    Raises:
        UserError: there are fewer FP8 products than there should be.
        HloParseError: the text of a program cannot be read.
    """
    follow = any(matmul.recipe for _, matmul in plan.matmul.spans(model.num_stacked_layers))
    linear = _linear_layers(parameter_shapes(model)["layers"]) if follow else 0
    wanted = _MATMULS_PER_LINEAR * linear
    made = 0
    for program in programs:
        text = program_text(program)
        parse_module(text)
        made += text.count(_FP8_PRODUCT)
    if made < wanted:
        raise UserError(
            f"FP8 on backend xla: of the {wanted} matrix products of a layer XLA made only {made} "
            "in FP8. Make hidden_size and each tensor rank's share of intermediate_size and heads "
            "multiples of 16, or set fp8.backend to reference or precision to bf16"
        )


def _linear_layers(layers: Any) -> int:
    """Count the linear layers of `layers`, a part of the parameters, that can multiply in FP8.

    Those of `UNQUANTIZED` never do, and experts multiply quantized operands in the compute dtype.
    """
    if "kernel" in layers:
        return 1
    inner = (below for name, below in layers.items() if name not in UNQUANTIZED | {"experts"})
    return sum(_linear_layers(below) for below in inner if isinstance(below, dict))


def batch_shape(sequences: int, sequence_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape the global batch of `geojax.data`: arrays [B, S] and [B]."""
    tokens = jax.ShapeDtypeStruct((sequences, sequence_length), jnp.int32)
    return {
        "tokens": tokens,
        "targets": tokens,
        "loss_mask": jax.ShapeDtypeStruct((sequences, sequence_length), jnp.float32),
        "segment_ids": tokens,
        "positions": tokens,
        "row": jax.ShapeDtypeStruct((sequences,), jnp.int32),
    }


def batch_specs(batch: Any, plan: StepPlan) -> Any:
    """Choose the sharding of each array of a batch: [B, S] or [B]."""
    return jax.tree.map(
        lambda leaf: plan.token_spec if len(leaf.shape) > 1 else plan.sequence_spec, batch
    )


def batch_on_mesh(batch: Any, plan: StepPlan) -> Any:
    """Give the shapes of a batch their shardings."""
    return jax.tree.map(
        lambda leaf, spec: _on_mesh(leaf, spec, plan.mesh), batch, batch_specs(batch, plan)
    )


def signals_on_mesh(plan: StepPlan) -> jax.ShapeDtypeStruct:
    """Shape and shard the signals of all ranks, [ranks, len(SIGNALS)]."""
    shape = jax.ShapeDtypeStruct((plan.mesh.size, len(SIGNALS)), jnp.float32)
    return _on_mesh(shape, plan.signal_spec, plan.mesh)


def _on_mesh(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
