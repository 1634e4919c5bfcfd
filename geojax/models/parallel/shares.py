"""Shares of the positions of a stream, for stages that share the work of a microbatch's head.

A share has the same positions of the stream of every rank of `tensor`; the last ones are padding
where the stream does not divide:

    tensor = 2 with `sequence`, 2 shares: rank 0 holds 0 1 2, rank 1 holds 3 4 5
      share 0: 0 1 of rank 0, 3 4 of rank 1      share 1: 2 and padding, 5 and padding
"""

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.parallel.parallelism import Parallelism


def in_shares(x: jax.Array, shares: int) -> jax.Array:
    """Pad the positions of a rank's stream [B, S, H] with zeros, so that they divide."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % shares), (0, 0)])


def share_of_targets(
    batch: dict[str, jax.Array],
    shares: int,
    share: jax.Array,
    counts: jax.Array,
    parallelism: Parallelism,
) -> dict[str, jax.Array]:
    """Return the targets and the loss mask of a share, [B, N]: all its positions, rank after rank.

    Args:
        batch: both for all positions, [B, S].
        shares: the number of them.
        share: the number of this one.
        counts: False if none of its positions counts.
        parallelism: how the ranks of `tensor` hold the stream.
    """
    ranks = parallelism.tensor if parallelism.sequence else 1

    def own(x: jax.Array) -> jax.Array:
        by_rank = in_shares(x.reshape(-1, x.shape[1] // ranks, 1), shares)
        length = by_rank.shape[1] // shares
        part = lax.dynamic_slice_in_dim(by_rank, share * length, length, axis=1)
        return part.reshape(x.shape[0], -1)

    targets, mask = own(batch["targets"]), own(batch["loss_mask"])
    return {"targets": targets, "loss_mask": jnp.where(counts, mask, 0)}
