"""MoE block: experts in the place of a layer's dense feed-forward block.

    stream ─► norm ─┬─► router ─► experts and gates of each token ─► load-balancing loss
                    ├─► experts that the tokens go to, times their gates ─┬─► contribution
                    └─► shared experts, which all tokens go to ───────────┘

The router reads the norm's output on the rank that holds the token, so that routing, drops and the
load-balancing loss are the same on every layout.

Shapes: B batch, S sequence, H hidden, E experts.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.collectives.axes import vary_over
from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters
from geojax.models.feed_forward import activated, times_kernel
from geojax.models.moe.aux_loss import auxiliary_losses
from geojax.models.moe.capacity import drop
from geojax.models.moe.dispatch import SLOTS, dispatch_and_combine, most_to_a_rank
from geojax.models.moe.experts import RoutedTokens, apply_experts
from geojax.models.moe.router import SCORE_BIAS, Routing, route
from geojax.models.moe.score_bias import with_excess
from geojax.models.moe.sharded_sequence import full_sequence_length
from geojax.models.norm import norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.tensor import copy_to_tp_region, reduce_from_tp_region
from geojax.precision import NO_FP8, LinearMatmul


def moe_block(
    parameters: Parameters,
    x: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> tuple[jax.Array, jax.Array]:
    """Compute the experts' contribution to the stream `x` [B, S, H], and their auxiliary loss.

    Padding goes to no expert but the shared ones, and takes no expert's capacity.

    Args:
        parameters: a layer's: the block reads its feed_forward_norm, router, experts and
            shared_experts.
        x: the residual stream.
        segment_ids: int32 [B, S] of the stream's positions, 0 for padding; None: no padding.
        positions: int32 [S], the stream's positions in the sequence.
        config: the model.
        parallelism: how model and sequences are sharded; `parameters` are this rank's shards.
        matmul: matmul of the experts; the router always multiplies in the compute dtype.

    Returns:
        [B, S, H] in the dtype of `x`, and [B] (see `AuxLosses.weighted`).
    """
    normed = norm(parameters["feed_forward_norm"], x, config)
    router = parameters["router"]
    routing = route(router, normed, config)
    real = None if segment_ids is None else segment_ids != 0
    z_loss = config.router_z_loss_coef > 0
    aux_loss = auxiliary_losses(routing, real, parallelism, z_loss=z_loss).weighted(config)
    experts = routing.experts
    if real is not None:
        experts = jnp.where(real[..., None], experts, config.num_experts)
    if SCORE_BIAS in router:
        gates = with_excess(routing.gates, router[SCORE_BIAS], experts)
        routing = routing._replace(gates=gates)
    experts = drop(experts, positions, config, parallelism)
    routing = routing._replace(experts=checkpoint_name(experts, SLOTS))
    return _apply(parameters, normed, routing, config, parallelism, matmul), aux_loss


def _apply(
    parameters: Parameters,
    normed: jax.Array,
    routing: Routing,
    config: ModelConfig,
    parallelism: Parallelism,
    matmul: LinearMatmul,
) -> jax.Array:
    """Sum the contributions of routed and shared experts, [B, S, H]."""
    if parallelism.expert == 1:
        stream = RoutedTokens(normed, routing.experts, routing.gates)
        stream = jax.tree.map(lambda leaf: copy_to_tp_region(leaf, parallelism), stream)
        tokens = _without_rows(stream)
        routed = apply_experts(parameters["experts"], tokens, config, parallelism, matmul)
        added = routed.reshape(stream.x.shape)
        if "shared_experts" in parameters:
            added += _shared(parameters["shared_experts"], stream.x, config, parallelism, matmul)
        return reduce_from_tp_region(added.astype(normed.dtype), parallelism)
    added = _travel(parameters["experts"], normed, routing, config, parallelism, matmul)
    if "shared_experts" in parameters:
        entered = copy_to_tp_region(normed, parallelism)
        shared = _shared(parameters["shared_experts"], entered, config, parallelism, matmul)
        added += reduce_from_tp_region(shared, parallelism)
    return added


def _shared(
    parameters: Parameters,
    x: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism,
    matmul: LinearMatmul,
) -> jax.Array:
    """Apply this rank's part of the shared experts, which side by side are one dense block."""
    middle = activated(parameters, x, config, parallelism, matmul)
    return times_kernel(parameters["down"], middle, parallelism, matmul, sharding="rows")


def _without_rows(tokens: RoutedTokens) -> RoutedTokens:
    return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), tokens)


def _travel(
    parameters: Parameters,
    normed: jax.Array,
    routing: Routing,
    config: ModelConfig,
    parallelism: Parallelism,
    matmul: LinearMatmul,
) -> jax.Array:
    """Send the stream's tokens to experts on other ranks and back, [B, S, H]."""
    sequences, positions, hidden = normed.shape
    tokens = _without_rows(RoutedTokens(normed, routing.experts, routing.gates))
    # Without sequence parallelism the ranks of `tensor` hold the same tokens: each sends a share.
    shared_out = parallelism.tensor > 1 and not parallelism.sequence
    if shared_out:
        share = functools.partial(_share, ranks=parallelism.tensor)
        nowhere = routing.probabilities.shape[-1]
        tokens = RoutedTokens(
            share(tokens.x), share(tokens.experts, fill=nowhere), share(tokens.gates)
        )
    sequence = full_sequence_length(positions, parallelism)
    most = most_to_a_rank(tokens.x.shape[0], sequences, sequence, config, parallelism)
    out = dispatch_and_combine(parameters, tokens, most, config, parallelism, matmul)
    out = out.astype(normed.dtype)
    if shared_out:
        out = lax.all_gather(out, "tensor", axis=0, tiled=True, to="invarying")[
            : sequences * positions
        ]
    return out.reshape(sequences, positions, hidden)


def _share(x: jax.Array, *, ranks: int, fill: int = 0) -> jax.Array:
    """Slice this `tensor` rank's share of `x` [N, ...], padded to a multiple of `ranks`."""
    size = -(-x.shape[0] // ranks)
    widths = [(0, ranks * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    padded = jnp.pad(vary_over(x, frozenset({"tensor"})), widths, constant_values=fill)
    return lax.dynamic_slice_in_dim(padded, lax.axis_index("tensor") * size, size)
