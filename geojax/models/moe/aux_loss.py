"""Auxiliary losses of a layer's experts, balance and z-loss, one number for each sequence.

Shapes: B batch, S sequence, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.models.config import ModelConfig
from geojax.models.moe.router import Routing
from geojax.models.moe.sharded_sequence import sequence_axes
from geojax.models.parallel.parallelism import Parallelism

COUNTS = "expert_counts"
"""Name of the counts that are summed over the ranks of a sequence, for remat policies."""


class AuxLosses(NamedTuple):
    """Losses of one layer's experts, [B] in at least float32, of whole sequences; 0 for padding."""

    balance: jax.Array
    """E * sum over experts of f_e * P_e; 1 if experts are equally busy."""
    z: jax.Array | None
    """Mean over tokens of the square of the log of the sum of exp(logit); None: not asked for."""

    def weighted(self, config: ModelConfig) -> jax.Array:
        """Return both, times their weights in a sequence's loss."""
        total = config.router_aux_loss_coef * self.balance
        return total if self.z is None else total + config.router_z_loss_coef * self.z


def auxiliary_losses(
    routing: Routing, real: jax.Array | None, parallelism: Parallelism, *, z_loss: bool = False
) -> AuxLosses:
    """Compute the losses that keep a layer's experts busy and its router's logits small.

    f_e is the share of the sequence's choices (k a token) that fell on expert e, before any is
    dropped, and P_e the mean of the router's probability for it. Fedus et al. 2021 ("Switch
    Transformers", equations 4 to 6) define it over a batch; over a sequence, as in DeepSeek-V2
    (2024, section 2.1.3, equations 23 to 25), it does not depend on the sequences that share a
    device. The z-loss is that of Zoph et al. 2022 ("ST-MoE", equation 5), of a sequence too.

    Args:
        routing: routing of this rank's positions.
        real: bool [B, S], False for padding, which does not count; None: no padding.
        parallelism: how the model is sharded. Ranks with other positions of the sequences add
            theirs: 2 E + 1 numbers a sequence, and one for the z-loss, are summed over the axes of
            `sequence_axes`.
        z_loss: compute the z-loss too.
    """
    sequences, positions, experts = routing.probabilities.shape
    wide = routing.probabilities.dtype
    weight = jnp.ones((sequences, positions), wide) if real is None else real.astype(wide)
    chosen = (routing.experts[..., None] == jnp.arange(experts)).astype(wide)  # [..., k, E]
    added = [
        jnp.einsum("rc,rcke->re", weight, chosen),
        jnp.einsum("rc,rce->re", weight, routing.probabilities),
        weight.sum(axis=1, keepdims=True),
    ]
    if z_loss:
        added.append(jnp.sum(weight * jnp.square(routing.log_sums), axis=1, keepdims=True))
    sums = jnp.concatenate(added, axis=1)
    axes = sequence_axes(parallelism)
    sums = checkpoint_name(lax.psum(sums, axes), COUNTS) if axes else sums
    count = jnp.maximum(sums[:, 2 * experts], 1)
    choices = routing.experts.shape[2]
    product = jnp.sum(sums[:, :experts] * sums[:, experts : 2 * experts], axis=1)
    balance = experts * product / (choices * count**2)
    return AuxLosses(balance, sums[:, 2 * experts + 1] / count if z_loss else None)


def weighted_aux_loss(aux_loss: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """Weigh the experts' losses for the sum of token losses: a scalar of at least float32.

    A sequence's loss counts as often as it has targets, so that neither the layout nor gradient
    accumulation changes it: the sum over sequences of targets * aux_loss.

    Args:
        aux_loss: [B], `AuxLosses.weighted` summed over layers, of whole sequences.
        loss_mask: [B, S] of this rank's positions; its sum over a sequence counts targets. (The
            ranks of `context` each weigh the sequence with their own targets, together with all.)
    """
    targets = loss_mask.astype(aux_loss.dtype).sum(axis=1)
    return jnp.sum(targets * aux_loss)
