"""One training step as one SPMD program, manual over every mesh axis.

    shards of the fp32 master weights
      -> gathered inside the site, in the compute dtype or as FP8 numbers
      -> loss and gradient of each microbatch, summed on the device     (no collective)
      -> chunk by chunk: psum_scatter in the site, a sum over dc        (several in flight)
      -> clip, AdamW on each rank's shard

Nothing crosses `dc` but the gradient chunks and one vector of four sums; and, if sites share the
scales of FP8 numbers, one vector of largest magnitudes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.collectives import FLOAT32, after, hierarchical_all_reduce
from geojax.models import ModelConfig
from geojax.optim import SHARD_AXES, global_norm, layout
from geojax.precision import LossScale
from geojax.step.amax_history import expected as expected_magnitudes
from geojax.step.amax_history import next_history
from geojax.step.error_feedback import scaled
from geojax.step.gradients import batch_loss, step_gradients
from geojax.step.plan import StepPlan
from geojax.step.state import TrainState

SIGNALS = ("stop", "save")
"""What any process may ask of all of them; summed over the mesh inside the step."""


STEP_NAME = "train_step"
"""The name of the compiled step, in profiles and in the count of compilations."""


def sum_over_mesh(values: jax.Array, plan: StepPlan) -> jax.Array:
    """A few numbers summed over all ranks that hold tokens or stages: in the site, then across.

    They cross as they are, but where gradients are sent in messages of our own, so are these: an
    all-reduce takes two trips over the link, and the swap of two sites one.
    """
    in_site = hierarchical_all_reduce(values, ("stage", *SHARD_AXES, "context"), ())
    own_messages = plan.wire is not None and values.dtype == jnp.float32
    return hierarchical_all_reduce(in_site, (), "dc", wire=FLOAT32 if own_messages else None)


def sum_of_signals(signals: jax.Array, loss: jax.Array) -> jax.Array:
    """[len(SIGNALS)] of [1, len(SIGNALS)], summed over the ranks of `tensor`.

    These make one loss together, so that `sum_over_mesh` leaves them out.
    """
    own = jnp.sum(signals.astype(loss.dtype), axis=0)
    return hierarchical_all_reduce(after(own, loss), "tensor", ())


class MeanGradients(NamedTuple):
    """What `mean_gradients` returns."""

    gradients: Any
    """The shards of the gradient of the mean loss over the global batch."""
    seen: Any
    """The magnitudes that this rank saw (see `geojax.step.amax_history`)."""
    wire_errors: Any
    """Those of this step (see `geojax.step.error_feedback`)."""
    metrics: dict[str, jax.Array]
    """The scalars `loss` (mean over targets), `targets`, one per signal and, of a mixture,
    `balance_loss` (what the balance of its experts adds to the loss): the same on every rank."""


def mean_gradients(
    shards: Any,
    batch: Any,
    signals: jax.Array,
    *,
    layouts: Any,
    model: ModelConfig,
    plan: StepPlan,
    dropout_key: jax.Array | None = None,
    loss_scale: jax.Array | None = None,
    expected: Any = None,
    wire_errors: Any = None,
) -> MeanGradients:
    """Sharded gradient of the mean loss over the global batch; call it inside the `shard_map`.

    Args:
        shards: this rank's shard of each parameter.
        batch: this rank's rows of the global batch.
        signals: [1, len(SIGNALS)], what this rank asks of all of them.
        layouts: the `LeafLayout` of each parameter.
        model: the model.
        plan: how the step runs.
        dropout_key: key of this step's dropout masks; None, no dropout.
        loss_scale: what the mean loss is multiplied by before gradients are taken, and they are
            divided by; None: nothing.
        expected: magnitudes for each linear layer (see `geojax.step.amax_history`); None: none.
        wire_errors: those of the step before (see `geojax.step.error_feedback`); None: none.
    """
    factor = None if loss_scale is None else loss_scale / _about_tokens(batch, plan)
    made = step_gradients(
        shards,
        batch,
        layouts=layouts,
        model=model,
        plan=plan,
        dropout_key=dropout_key,
        gradient_factor=factor,
        expected=expected,
        wire_errors=scaled(wire_errors, factor),
    )
    signal = sum_of_signals(signals, made.loss)
    balance = [] if made.balance is None else [made.balance]
    local = jnp.stack([made.loss, made.targets, *signal, *balance])
    loss, count, *others = sum_over_mesh(local, plan)
    count = jnp.maximum(count, 1)
    divisor = count if factor is None else count * factor
    mean = jax.tree.map(lambda leaf: leaf / divisor.astype(leaf.dtype), made.gradients)
    metrics = {"loss": loss / count, "targets": count}
    metrics |= dict(zip(SIGNALS, others[: len(SIGNALS)], strict=True))
    if balance:
        metrics["balance_loss"] = others[-1] / count
    errors = scaled(made.wire_errors, None if factor is None else 1 / factor)
    return MeanGradients(mean, made.seen, errors, metrics)


def _about_tokens(batch: Any, plan: StepPlan) -> float:
    """The power of two nearest to the number of tokens in the global batch.

    What is differentiated is the sum of the losses of all tokens, since their mean would need to
    know how many count. A loss scale speaks of the mean: its gradients do not grow with the batch.
    """
    axes = (*plan.batch_axes, "context")
    tokens = batch["tokens"].size * math.prod(plan.mesh.shape[axis] for axis in axes)
    return 2.0 ** round(math.log2(tokens))


def update_state(
    state: TrainState,
    batch: Any,
    signals: jax.Array,
    seed: jax.Array,
    *,
    layouts: TrainState,
    model: ModelConfig,
    plan: StepPlan,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The step inside the `shard_map`: state and batch to the next state and the step's metrics.

    A loss or gradient that is not finite on any rank is seen by all of them (both are sums over
    the mesh): then the state stays as it is, except for its counters and the loss scale.
    """
    scale: LossScale | None = state.loss_scale
    dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)
    gradients, seen, wire_errors, metrics = mean_gradients(
        state.parameters,
        batch,
        signals,
        layouts=layouts.parameters,
        model=model,
        plan=plan,
        dropout_key=dropout_key if model.dropout else None,
        loss_scale=scale.scale if scale else None,
        expected=expected_magnitudes(state.amax_history, plan),
        wire_errors=state.wire_errors,
    )
    norm = global_norm(gradients, layouts.parameters)
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    updates, optimizer_state = optimizer.update(
        gradients, state.optimizer, state.parameters, norm=norm, finite=finite
    )
    parameters = optax.apply_updates(state.parameters, updates)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(functools.partial(jnp.where, finite), new, old)

    def keep_count(new: jax.Array, old: jax.Array) -> Any:
        return keep(new, old) if new.ndim == 0 else new  # moments were kept, in place

    skip = 1 - finite.astype(jnp.int32)
    after = TrainState(
        step=state.step + 1,
        parameters=keep(parameters, state.parameters),
        optimizer=jax.tree.map(keep_count, optimizer_state, state.optimizer),
        skipped=state.skipped + skip,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skip,
        loss_scale=scale.after(finite, plan.loss_scale) if scale else None,
        amax_history=keep(next_history(state.amax_history, seen, plan), state.amax_history),
        wire_errors=keep(wire_errors, state.wire_errors),
    )
    metrics |= {
        "step": after.step,
        "gradient_norm": norm,
        "learning_rate": jnp.asarray(schedule(state.step - state.skipped + 1)),
        "skipped": after.skipped,
        "skipped_in_a_row": after.skipped_in_a_row,
    }
    if scale:
        metrics["loss_scale"] = scale.scale
    return after, metrics


def trace_step(
    layouts: TrainState,
    model: ModelConfig,
    plan: StepPlan,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    batch: Any,
) -> jax.stages.Traced:
    """The step `(state, batch, signals, seed) -> (state, metrics)`, to be lowered and compiled.

    The state is donated. Compiled for these shapes, it refuses others and never recompiles.

    Args:
        layouts: from `state_layouts`.
        model: the model.
        plan: how the step runs.
        optimizer: the optax chain that runs on shards.
        schedule: learning rate by update, for the metrics.
        batch: the global batch as `jax.ShapeDtypeStruct`s, without shardings.
    """
    specs = jax.tree.map(lambda place: place.spec(), layouts)

    def train_step(state: TrainState, *inputs: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        return update_state(
            state,
            *inputs,
            layouts=layouts,
            model=model,
            plan=plan,
            optimizer=optimizer,
            schedule=schedule,
        )

    assert train_step.__name__ == STEP_NAME, "compilations are counted by this name"
    program = jax.shard_map(
        train_step,
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


def lower_step(*what: Any) -> jax.stages.Lowered:
    """The step of `trace_step`, which takes the same arguments, lowered for the mesh's devices."""
    return trace_step(*what).lower()


def compile_evaluation(
    layouts: TrainState, model: ModelConfig, plan: StepPlan, batch: Any
) -> jax.stages.Compiled:
    """The compiled validation pass: `(state, batch) -> [sum of losses, number of targets]`."""
    specs = jax.tree.map(lambda place: place.spec(), layouts)

    def evaluate(state: TrainState, rows: Any) -> jax.Array:
        expected = expected_magnitudes(state.amax_history, plan)
        sums = batch_loss(
            state.parameters,
            rows,
            layouts=layouts.parameters,
            model=model,
            plan=plan,
            expected=expected,
        )
        return sum_over_mesh(jnp.stack(sums), plan)

    program = jax.shard_map(
        evaluate,
        mesh=plan.mesh,
        in_specs=(specs, batch_specs(batch, plan)),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    arguments = (layout.abstract(layouts, plan.mesh), batch_on_mesh(batch, plan))
    return jax.jit(program).lower(*arguments).compile(compiler_options=plan.compiler_options)


def batch_shape(rows: int, sequence: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The global batch of `geojax.data` as shapes."""
    tokens = jax.ShapeDtypeStruct((rows, sequence), jnp.int32)
    return {
        "tokens": tokens,
        "targets": tokens,
        "loss_mask": jax.ShapeDtypeStruct((rows, sequence), jnp.float32),
        "segment_ids": tokens,
        "positions": tokens,
        "row": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def batch_specs(batch: Any, plan: StepPlan) -> Any:
    """How each array of the batch lies on the mesh: [rows, sequence] or [rows]."""
    return jax.tree.map(
        lambda leaf: plan.token_spec if len(leaf.shape) > 1 else plan.row_spec, batch
    )


def batch_on_mesh(batch: Any, plan: StepPlan) -> Any:
    """Shapes of a batch with their shardings."""
    return jax.tree.map(
        lambda leaf, spec: _on_mesh(leaf, spec, plan.mesh), batch, batch_specs(batch, plan)
    )


def signals_on_mesh(plan: StepPlan) -> jax.ShapeDtypeStruct:
    """The signals of all ranks, [ranks, len(SIGNALS)]."""
    shape = jax.ShapeDtypeStruct((plan.mesh.size, len(SIGNALS)), jnp.float32)
    return _on_mesh(shape, plan.signal_spec, plan.mesh)


def _on_mesh(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
