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
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.collectives.axes import vary_over
from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings, LayerContext
from geojax.models.declaration import Parameters
from geojax.models.layers import FeedForward
from geojax.models.moe.aux_loss import auxiliary_losses
from geojax.models.moe.capacity import drop
from geojax.models.moe.dispatch import SLOTS, dispatch_and_combine, most_to_a_rank
from geojax.models.moe.experts import RoutedTokens, apply_experts
from geojax.models.moe.router import Router, Routing
from geojax.models.moe.score_bias import with_excess
from geojax.models.moe.sharded_sequence import full_sequence_length
from geojax.models.parallel.tensor import copy_to_tp_region, reduce_from_tp_region


class MoE(nnx.Module):
    """A router, experts, and perhaps experts that all tokens go to."""

    def __init__(self, config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE):
        self.config, self.compute = config, compute
        self.router = Router(config)
        experts, width = config.num_experts, config.moe_intermediate_size
        self.experts = FeedForward(width, config, compute, bias=config.moe_bias, experts=experts)
        if config.n_shared_experts:
            width = config.shared_expert_intermediate_size
            self.shared_experts = FeedForward(width, config, compute)

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array | None]:
        """Compute the experts' contribution to the stream, and their auxiliary loss.

        Padding goes to no expert but the shared ones, and takes no expert's capacity.

        Args:
            x: [B, S, H], the stream after the norm.
            context: segment ids and positions of the stream, which may be a part of the sequence.

        Returns:
            [B, S, H] in the dtype of `x`, and [B] (see `AuxLosses.weighted`).
        """
        config, parallelism = self.config, self.compute.parallelism
        routing = self.router.route(x)
        real = None if context.segment_ids is None else context.segment_ids != 0
        z_loss = config.router_z_loss_coef > 0
        aux_loss = auxiliary_losses(routing, real, parallelism, z_loss=z_loss).weighted(config)
        experts = routing.experts
        if real is not None:
            experts = jnp.where(real[..., None], experts, config.num_experts)
        if config.use_router_bias:
            bias = self.router.score_bias.get_value()
            routing = routing._replace(gates=with_excess(routing.gates, bias, experts))
        experts = drop(experts, context.sequence_positions, config, parallelism)
        routing = routing._replace(experts=checkpoint_name(experts, SLOTS))
        return self._apply(x, routing, context), aux_loss

    def _apply(self, normed: jax.Array, routing: Routing, context: LayerContext) -> jax.Array:
        """Sum the contributions of routed and shared experts, [B, S, H]."""
        parallelism, has_shared = self.compute.parallelism, self.config.n_shared_experts > 0
        experts = nnx.to_pure_dict(nnx.state(self.experts))
        if parallelism.expert == 1:
            stream = RoutedTokens(normed, routing.experts, routing.gates)
            stream = jax.tree.map(lambda leaf: copy_to_tp_region(leaf, parallelism), stream)
            matmul = self.compute.matmul_at(context)
            routed = apply_experts(experts, _without_rows(stream), self.config, parallelism, matmul)
            added = routed.reshape(stream.x.shape)
            if has_shared:
                added += self._shared(stream.x, context)
            return reduce_from_tp_region(added.astype(normed.dtype), parallelism)
        added = self._travel(experts, normed, routing, context)
        if has_shared:
            shared = self._shared(copy_to_tp_region(normed, parallelism), context)
            added += reduce_from_tp_region(shared, parallelism)
        return added

    def _shared(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """Apply this rank's part of the shared experts, which side by side are one dense block."""
        shared = self.shared_experts
        return shared.down.products(shared.middle((x,), context), context)[0]

    def _travel(
        self, experts: Parameters, normed: jax.Array, routing: Routing, context: LayerContext
    ) -> jax.Array:
        """Send the stream's tokens to experts on other ranks and back, [B, S, H]."""
        config, parallelism = self.config, self.compute.parallelism
        sequences, positions, hidden = normed.shape
        tokens = _without_rows(RoutedTokens(normed, routing.experts, routing.gates))
        # Without sequence parallelism the ranks of `tensor` hold the same tokens: each sends a
        # share.
        shared_out = parallelism.tensor > 1 and not parallelism.sequence
        if shared_out:
            share = functools.partial(_share, ranks=parallelism.tensor)
            nowhere = routing.probabilities.shape[-1]
            tokens = RoutedTokens(
                share(tokens.x), share(tokens.experts, fill=nowhere), share(tokens.gates)
            )
        sequence = full_sequence_length(positions, parallelism)
        most = most_to_a_rank(tokens.x.shape[0], sequences, sequence, config, parallelism)
        matmul = self.compute.matmul_at(context)
        out = dispatch_and_combine(experts, tokens, most, config, parallelism, matmul)
        out = out.astype(normed.dtype)
        if shared_out:
            out = lax.all_gather(out, "tensor", axis=0, tiled=True, to="invarying")[
                : sequences * positions
            ]
        return out.reshape(sequences, positions, hidden)


def _without_rows(tokens: RoutedTokens) -> RoutedTokens:
    return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), tokens)


def _share(x: jax.Array, *, ranks: int, fill: int = 0) -> jax.Array:
    """Slice this `tensor` rank's share of `x` [N, ...], padded to a multiple of `ranks`."""
    size = -(-x.shape[0] // ranks)
    widths = [(0, ranks * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    padded = jnp.pad(vary_over(x, frozenset({"tensor"})), widths, constant_values=fill)
    return lax.dynamic_slice_in_dim(padded, lax.axis_index("tensor") * size, size)
