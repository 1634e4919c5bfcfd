"""One training step as one SPMD program, manual over every mesh axis.

    shards of the fp32 master weights
      -> gathered inside the site, in the compute dtype
      -> loss and gradient of each microbatch, summed on the device     (no collective)
      -> chunk by chunk: psum_scatter in the site, psum over dc         (several in flight)
      -> clip, AdamW on each rank's shard

Nothing crosses `dc` but the gradient chunks and one vector of four sums.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.collectives import (
    all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from geojax.models import ModelConfig, loss_sum
from geojax.optim import SHARD_AXES, global_norm, layout
from geojax.precision import Policy
from geojax.train.state import TrainState

BATCH_AXES = ("dc", *SHARD_AXES)
"""The axes over which the rows of a batch are spread."""

BATCH_SPEC = PartitionSpec(BATCH_AXES)

SIGNALS = ("stop", "save")
"""What any process may ask of all of them; summed over the mesh inside the step."""


STEP_NAME = "train_step"
"""The name of the compiled step, in profiles and in the count of compilations."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a step runs on a mesh: everything that shapes the program but not its result."""

    mesh: Mesh
    """The mesh, with all six axes."""

    policy: Policy
    """Dtypes of the weights, the compute and the reduction."""

    accumulation: int = 1
    """Microbatches per step on each device."""

    chunk_bytes: int | None = None
    """Size of a chunk of the gradient reduction; None, one chunk a leaf."""

    wire_dtype: Any = None
    """Dtype of gradients on the link between sites; None, as they are."""

    remat: str = "none"
    """Rematerialisation policy of the layers: "none", "selective" or "full"."""

    attention: str = "auto"
    """Implementation of the attention seam."""


def gather_weights(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """Whole weights in the compute dtype from each rank's shard; nothing crosses `dc`.

    They are typed as varying over every batch axis, so that their gradient stays on the device
    until `reduce_gradients` sums it.
    """
    weights = all_gather(
        shards,
        SHARD_AXES,
        dims=jax.tree.map(lambda place: place.dim, layouts),
        shapes=jax.tree.map(lambda place: place.shape, layouts),
        dtype=plan.policy.compute_dtype,
    )
    return jax.tree.map(_varying_over_batch_axes, weights)


def local_gradients(
    weights: Any, batch: Any, model: ModelConfig, plan: StepPlan, dropout_key: jax.Array | None
) -> tuple[Any, jax.Array, jax.Array]:
    """Gradient, loss and target count of this device's rows, summed over its microbatches.

    Returns the gradient of the *sum* of the tokens' losses, in the policy's reduction dtype, that
    sum, and the number of targets: a mean would weigh microbatches with few targets too much.
    """

    def one(microbatch: Any) -> tuple[Any, jax.Array, jax.Array]:
        (loss, count), gradients = jax.value_and_grad(loss_sum, has_aux=True)(
            weights,
            microbatch,
            model,
            dropout_key=dropout_key,
            attention=plan.attention,
            remat=plan.remat,
        )
        cast = jax.tree.map(lambda leaf: leaf.astype(plan.policy.reduce_dtype), gradients)
        return cast, loss, count

    if plan.accumulation == 1:
        return one(batch)

    def accumulate(total: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(microbatch)), None

    rows = jax.tree.map(
        lambda leaf: leaf.reshape(plan.accumulation, -1, *leaf.shape[1:]), batch
    )  # [rows, ...] -> [microbatch, rows of one, ...]
    first = jax.tree.map(lambda leaf: leaf[0], rows)
    zero = jax.tree.map(
        lambda leaf: _varying_over_batch_axes(jnp.zeros(leaf.shape, leaf.dtype)),
        jax.eval_shape(one, first),
    )
    total, _ = jax.lax.scan(accumulate, zero, rows)
    gradients, loss, count = total
    return gradients, loss, count


def reduce_gradients(gradients: Any, layouts: Any, plan: StepPlan) -> Any:
    """Each rank's shard of the gradient, summed over sites and over the ranks in each."""
    return hierarchical_reduce_scatter(
        gradients,
        SHARD_AXES,
        "dc",
        dims=jax.tree.map(lambda place: place.dim, layouts),
        chunk_bytes=plan.chunk_bytes,
        wire_dtype=plan.wire_dtype,
    )


def sum_over_mesh(values: jax.Array) -> jax.Array:
    """A few numbers summed over all ranks that hold rows: first in the site, then across sites."""
    in_site = hierarchical_all_reduce(values, SHARD_AXES, ())
    return hierarchical_all_reduce(in_site, (), "dc")


def mean_gradients(
    shards: Any,
    batch: Any,
    signals: jax.Array,
    *,
    layouts: Any,
    model: ModelConfig,
    plan: StepPlan,
    dropout_key: jax.Array | None = None,
) -> tuple[Any, dict[str, jax.Array]]:
    """Sharded gradient of the mean loss over the global batch; call it inside the `shard_map`.

    Args:
        shards: this rank's shard of each parameter.
        batch: this rank's rows of the global batch.
        signals: [1, len(SIGNALS)], what this rank asks of all of them.
        layouts: the `LeafLayout` of each parameter.
        model: the model.
        plan: how the step runs.
        dropout_key: key of this step's dropout masks; None, no dropout.

    Returns:
        The gradient's shards, and the scalars `loss` (mean over targets), `targets` and one per
        signal: the same numbers on every rank.
    """
    weights = gather_weights(shards, layouts, plan)
    gradients, loss, count = local_gradients(weights, batch, model, plan, dropout_key)
    reduced = reduce_gradients(gradients, layouts, plan)
    local = jnp.stack([loss, count, *jnp.sum(signals.astype(loss.dtype), axis=0)])
    loss, count, *asked = sum_over_mesh(local)
    count = jnp.maximum(count, 1)
    mean = jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), reduced)
    return mean, {"loss": loss / count, "targets": count, **dict(zip(SIGNALS, asked, strict=True))}


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
    the mesh): then the state stays as it is, except for its counters.
    """
    dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)
    gradients, metrics = mean_gradients(
        state.parameters,
        batch,
        signals,
        layouts=layouts.parameters,
        model=model,
        plan=plan,
        dropout_key=dropout_key if model.dropout else None,
    )
    norm = global_norm(gradients, SHARD_AXES)
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    updates, optimizer_state = optimizer.update(
        gradients, state.optimizer, state.parameters, norm=norm
    )
    parameters = optax.apply_updates(state.parameters, updates)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(functools.partial(jnp.where, finite), new, old)

    skip = 1 - finite.astype(jnp.int32)
    after = TrainState(
        step=state.step + 1,
        parameters=keep(parameters, state.parameters),
        optimizer=keep(optimizer_state, state.optimizer),
        skipped=state.skipped + skip,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skip,
    )
    metrics |= {
        "step": after.step,
        "gradient_norm": norm,
        "learning_rate": jnp.asarray(schedule(state.step - state.skipped + 1)),
        "skipped": after.skipped,
        "skipped_in_a_row": after.skipped_in_a_row,
    }
    return after, metrics


def lower_step(
    layouts: TrainState,
    model: ModelConfig,
    plan: StepPlan,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    batch: Any,
) -> jax.stages.Lowered:
    """The step `(state, batch, signals, seed) -> (state, metrics)`, to be compiled once.

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
        in_specs=(specs, BATCH_SPEC, BATCH_SPEC, PartitionSpec()),
        out_specs=(specs, PartitionSpec()),
        check_vma=True,
    )
    arguments = (
        layout.abstract(layouts, plan.mesh),
        on_mesh(batch, plan.mesh),
        on_mesh(signals_shape(plan.mesh), plan.mesh),
        jax.ShapeDtypeStruct((), jnp.uint32, sharding=NamedSharding(plan.mesh, PartitionSpec())),
    )
    return jax.jit(program, donate_argnums=0).lower(*arguments)


def compile_evaluation(
    layouts: TrainState, model: ModelConfig, plan: StepPlan, batch: Any
) -> jax.stages.Compiled:
    """The compiled validation pass: `(parameters, batch) -> [sum of losses, number of targets]`."""
    specs = jax.tree.map(lambda place: place.spec(), layouts.parameters)

    def evaluate(shards: Any, rows: Any) -> jax.Array:
        weights = gather_weights(shards, layouts.parameters, plan)
        loss, count = loss_sum(weights, rows, model, attention=plan.attention)
        return sum_over_mesh(jnp.stack([loss, count]))

    program = jax.shard_map(
        evaluate,
        mesh=plan.mesh,
        in_specs=(specs, BATCH_SPEC),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    arguments = (layout.abstract(layouts.parameters, plan.mesh), on_mesh(batch, plan.mesh))
    return jax.jit(program).lower(*arguments).compile()


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


def signals_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The signals of all ranks that hold rows."""
    ranks = 1
    for axis in BATCH_AXES:
        ranks *= mesh.shape[axis]
    return jax.ShapeDtypeStruct((ranks, len(SIGNALS)), jnp.float32)


def on_mesh(tree: Any, mesh: Mesh) -> Any:
    """Shapes of a batch with the sharding of its rows."""
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def _varying_over_batch_axes(leaf: jax.Array) -> jax.Array:
    missing = tuple(axis for axis in BATCH_AXES if axis not in jax.typeof(leaf).mat.varying)
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf
