"""The loss that keeps the experts of a layer equally busy, one number for each row."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.models.config import ModelConfig
from geojax.models.moe.router import Routing
from geojax.models.moe.sharded_sequence import sequence_axes
from geojax.models.parallel.parallelism import Parallelism

COUNTS = "expert_counts"
"""Name of what is summed over the ranks that share rows, for rematerialisation policies."""


def load_balancing_loss(
    routing: Routing, real: jax.Array | None, parallelism: Parallelism
) -> jax.Array:
    """E * sum over experts of f_e * P_e, for each row; 1 where the experts are equally busy.

    f_e is the share of the row's choices (k a token) that fell on expert e, before any is dropped,
    and P_e the mean of the router's probability for it. Fedus et al. 2021 ("Switch Transformers",
    equations 4 to 6) define it over a batch; over a sequence, as in DeepSeek-V2 (2024, section
    2.1.3, equations 23 to 25), it does not depend on which rows a device happens to hold.

    Args:
        routing: of this rank's columns.
        real: bool [rows, columns], False for padding, which does not count; None: all are real.
        parallelism: how the model is spread. The ranks that hold other columns of the rows add
            theirs: 2 E + 1 numbers a row are summed over the axes of `sequence_axes`.

    Returns:
        [rows] in at least float32, of whole rows; 0 for a row of padding.
    """
    rows, columns, experts = routing.probabilities.shape
    wide = routing.probabilities.dtype
    weight = jnp.ones((rows, columns), wide) if real is None else real.astype(wide)
    chosen = (routing.experts[..., None] == jnp.arange(experts)).astype(wide)  # [..., k, E]
    sums = jnp.concatenate(
        [
            jnp.einsum("rc,rcke->re", weight, chosen),
            jnp.einsum("rc,rce->re", weight, routing.probabilities),
            weight.sum(axis=1, keepdims=True),
        ],
        axis=1,
    )
    axes = sequence_axes(parallelism)
    sums = checkpoint_name(lax.psum(sums, axes), COUNTS) if axes else sums
    count = jnp.maximum(sums[:, 2 * experts], 1)
    choices = routing.experts.shape[2]
    product = jnp.sum(sums[:, :experts] * sums[:, experts : 2 * experts], axis=1)
    return experts * product / (choices * count**2)


def weighted_aux_loss(balance: jax.Array, loss_mask: jax.Array, config: ModelConfig) -> jax.Array:
    """What the balance adds to the sum of a row set's token losses: a scalar of at least float32.

    A row's balance counts as often as the row has targets, so that neither the layout nor
    accumulation changes it: balance_coefficient * sum over rows of targets * balance.

    Args:
        balance: [rows], summed over layers, of whole rows.
        loss_mask: [rows, columns] of this rank's columns; its sum over a row counts targets. (The
            ranks of `context` each weigh the row with their own targets, and together with all.)
        config: the model.
    """
    targets = loss_mask.astype(balance.dtype).sum(axis=1)
    return config.router_aux_loss_coef * jnp.sum(targets * balance)
