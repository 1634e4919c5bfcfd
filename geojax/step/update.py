"""One training step: sums over the batch of a site, then the update that they make of the state.

    site_sums        fp32 master shards -> weights gathered in the site -> loss and gradient of each
                     microbatch, summed on the device -> psum_scatter in the site
    sum_over_sites   what the sites' sums make together
    apply_sums       mean over all targets, clip, optimizer on each rank's shard

`train_step` composes the three in one SPMD program, manual over every mesh axis. There the
gradients' sum over `dc` is part of `site_sums`, bucket by bucket: a bucket crosses while others are
still reduced inside the site or, with overlap, while the backward pass of other layers runs. Beside
the buckets one vector of scalars crosses and, where sites share the scales of FP8 numbers, one
vector of amax.

On the mesh of one site `sum_over_sites` sends nothing and `site_sums` are the sums of that site:
sites with a runtime each add theirs over a transport of their own, and each applies the total.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from geojax.collectives import FLOAT32, after, all_reduce
from geojax.models import AnyModel
from geojax.optim import apply_updates, global_norm, keep_on_skipped_steps, select
from geojax.precision import LossScale
from geojax.sharding import SHARD_AXES
from geojax.step.amax_history import max_in_site, max_over_sites, next_history, prev_amax
from geojax.step.gradients import step_gradients
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.state import TrainState


class SiteSums(NamedTuple):
    """Sums over a batch: all that the update of the state needs to know of it.

    None of them is a mean or carries a loss scale, so that those of sites with unequal shares of
    the batch add up.
    """

    gradients: Any
    """Each rank's shards of the gradient of the sum of all losses, in the reduction dtype.

    Already summed over all sites of the mesh, since buckets cross `dc` as they come."""
    scalars: jax.Array
    """float32 [2 + signals (+ 2)]: loss, number of targets, signals, with modules for later tokens
    their loss, and with experts the aux loss."""
    amax: jax.Array | None
    """float32 [n]: the layers' amax, a maximum instead of a sum; None without a history."""
    error_feedback: Any
    """The rounding errors of this site's gradients on the link (see `geojax.step.error_feedback`).

    They stay at their site; None where none are kept."""


def site_sums(
    state: TrainState,
    batch: Any,
    signals: jax.Array,
    *,
    layouts: Any,
    model: AnyModel,
    plan: StepPlan,
    dropout_key: jax.Array | None = None,
) -> SiteSums:
    """Sum losses and gradients over the batch of a site; call it inside the `shard_map`.

    Args:
        state: this rank's shards; counters and optimizer state are not read.
        batch: this rank's sequences of the global batch.
        signals: [1, len(SIGNALS)], this rank's requests to all ranks.
        layouts: the `LeafLayout` of each weight, frozen ones marked.
        model: the model.
        plan: how the step runs.
        dropout_key: key of this step's dropout masks; None, no dropout.
    """
    factor = gradient_factor(state.loss_scale, batch, plan)
    made = step_gradients(
        state.weights,
        batch,
        layouts=layouts,
        model=model,
        plan=plan,
        dropout_key=dropout_key,
        gradient_factor=factor,
        prev_amax=prev_amax(state.amax_history, plan),
        error_feedback=scaled(state.error_feedback, factor),
    )
    signal = sum_signals(signals, made.loss)
    of_some = [each for each in (made.mtp_loss, made.aux_loss) if each is not None]
    unscale = None if factor is None else 1 / factor
    return SiteSums(
        scaled(made.gradients, unscale),
        sum_in_site(jnp.stack([made.loss, made.targets, *signal, *of_some])),
        max_in_site(made.amax, plan),
        scaled(made.error_feedback, unscale),
    )


def gradient_factor(loss_scale: LossScale | None, batch: Any, plan: StepPlan) -> jax.Array | None:
    """Return the factor that gradients of the sum of losses are computed with; None: there is none.

    Args:
        loss_scale: that of the state.
        batch: this rank's sequences.
        plan: how the step runs.
    """
    return None if loss_scale is None else loss_scale.scale / _about_tokens(batch, plan)


def scaled(tree: Any, factor: jax.Array | None) -> Any:
    """Multiply all leaves with `factor`, where there is one."""
    if factor is None:
        return tree
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)


def _about_tokens(batch: Any, plan: StepPlan) -> float:
    """Round the number of tokens in the global batch to the nearest power of two.

    The sum of all tokens' losses is differentiated, since their mean would need to know how many
    count. A loss scale is one of the mean: its gradients do not grow with the batch.
    """
    axes = (*plan.batch_axes, "context")
    tokens = batch["tokens"].size * math.prod(plan.mesh.shape[axis] for axis in axes)
    return 2.0 ** round(math.log2(tokens))


@jax.named_scope("sum_scalars")
def sum_signals(signals: jax.Array, loss: jax.Array) -> jax.Array:
    """Sum signals [1, len(SIGNALS)] over the ranks of `tensor`, to [len(SIGNALS)].

    Those ranks make one loss together, so that `sum_in_site` leaves them out.
    """
    own = jnp.sum(signals.astype(loss.dtype), axis=0)
    return all_reduce(after(own, loss), "tensor", ())


@jax.named_scope("sum_scalars")
def sum_in_site(scalars: jax.Array) -> jax.Array:
    """Sum a few numbers over the ranks of a site that hold other tokens or other stages."""
    return all_reduce(scalars, ("stage", *SHARD_AXES, "context"), ())


@jax.named_scope("sum_scalars")
def sum_scalars_over_sites(scalars: jax.Array, plan: StepPlan) -> jax.Array:
    """Sum the results of `sum_in_site` over the sites.

    Where gradients are sent in messages of our own, these are too: an all-reduce takes two trips
    over the link, and the swap of two sites one.
    """
    own_messages = plan.wire_format is not None and scalars.dtype == jnp.float32
    return all_reduce(scalars, (), "dc", bucket_bytes=None, wire=FLOAT32 if own_messages else None)


def sum_over_sites(sums: SiteSums, plan: StepPlan) -> SiteSums:
    """Sum everything but the gradients over the sites; `site_sums` has summed those already."""
    return sums._replace(
        scalars=sum_scalars_over_sites(sums.scalars, plan),
        amax=max_over_sites(sums.amax, plan),
    )


def mean_over_targets(sums: SiteSums) -> tuple[Any, dict[str, jax.Array]]:
    """Divide sums over all sites by their number of targets.

    Returns:
        The shards of the gradient of the mean loss; and the scalars `loss`, `targets`, one per
        signal and, of models that have them, `mtp_loss` and `aux_loss`, the same on every rank.
    """
    loss, count, *others = sums.scalars
    count = jnp.maximum(count, 1)
    mean = jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), sums.gradients)
    metrics = {"loss": loss / count, "targets": count}
    metrics |= dict(zip(SIGNALS, others[: len(SIGNALS)], strict=True))
    names = ("mtp_loss", "aux_loss") if "mtp" in mean else ("aux_loss",)
    of_some = others[len(SIGNALS) :]
    metrics |= {name: each / count for name, each in zip(names, of_some, strict=False)}
    return mean, metrics


@jax.named_scope("optimizer_update")
def apply_sums(
    state: TrainState,
    sums: SiteSums,
    *,
    layouts: TrainState,
    plan: StepPlan,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    norm_of_sums: jax.Array | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the state with the sums over all sites; call it inside the `shard_map`.

    All ranks see a loss or gradient that is not finite on any rank, since both are sums over all
    ranks. The state then stays as it is, except for its counters and the loss scale.

    Args:
        state: this rank's shards.
        sums: over all sites, not only those of the mesh.
        layouts: the `LeafLayout` of each leaf of the state.
        plan: how the step runs.
        optimizer: the optax chain that runs on shards.
        schedule: learning rate by update, for the metrics.
        norm_of_sums: the norm of the sums of all gradients, where the mesh holds a part of the
            parameters; None: it holds all.
    """
    scale: LossScale | None = state.loss_scale
    gradients, metrics = mean_over_targets(sums)
    if norm_of_sums is None:
        norm = global_norm(gradients, layouts.parameters)
    else:
        norm = norm_of_sums / metrics["targets"].astype(norm_of_sums.dtype)
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    updates, optimizer_state = keep_on_skipped_steps(optimizer).update(
        gradients,
        state.optimizer,
        state.parameters,
        norm=norm,
        finite=finite,
        layouts=layouts.parameters,
    )
    history = next_history(state.amax_history, sums.amax)
    skip = 1 - finite.astype(jnp.int32)
    next_state = TrainState(
        step=state.step + 1,
        parameters=apply_updates(state.parameters, updates, finite),
        optimizer=optimizer_state,
        skipped=state.skipped + skip,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skip,
        loss_scale=scale.after(finite, plan.loss_scale) if scale else None,
        amax_history=select(finite, history, state.amax_history),
        error_feedback=select(finite, sums.error_feedback, state.error_feedback),
        frozen=state.frozen,
    )
    metrics |= {
        "step": next_state.step,
        "gradient_norm": norm,
        "learning_rate": jnp.asarray(schedule(state.step - state.skipped + 1)),
        "skipped": next_state.skipped,
        "skipped_in_a_row": next_state.skipped_in_a_row,
    }
    if scale:
        metrics["loss_scale"] = scale.scale
    return next_state, metrics


def train_step(
    state: TrainState,
    batch: Any,
    signals: jax.Array,
    seed: jax.Array,
    *,
    layouts: TrainState,
    model: AnyModel,
    plan: StepPlan,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Run the step of a mesh that holds all sites: state and batch to next state and metrics."""
    dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)
    sums = site_sums(
        state,
        batch,
        signals,
        layouts=layouts.weights,
        model=model,
        plan=plan,
        dropout_key=dropout_key if model.is_random else None,
    )
    sums = sum_over_sites(sums, plan)
    return apply_sums(
        state, sums, layouts=layouts, plan=plan, optimizer=optimizer, schedule=schedule
    )
