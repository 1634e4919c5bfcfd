"""A layer of a transformer: attention, and a feed-forward block or experts.

Shapes: B batch, S sequence, H hidden.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from flax import nnx

from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings, LayerContext
from geojax.models.latent_attention import LatentAttention
from geojax.models.layers import FeedForward, Norm, dropout
from geojax.models.moe import MoE
from geojax.models.parallel.tensor import join_stream, split_stream, stream_positions
from geojax.models.self_attention import Attention, computed_twice, keep_products


class Block(nnx.Module):
    """A layer whose second half is a dense feed-forward block."""

    attention_class: ClassVar[type[Attention]] = Attention
    supports: ClassVar[frozenset[str]] = frozenset({"tensor", "sequence", "context"})
    """Kinds of parallelism inside it, as blocks of a model of your own say theirs."""

    def __init__(self, config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE):
        self.config, self.compute, hidden = config, compute, config.hidden_size
        of_heads: Any = LatentAttention if config.has_latent_attention else self.attention_class
        self.attention_norm = Norm(hidden, config)
        self.attention = of_heads(config, compute)
        self.feed_forward_norm = Norm(hidden, config)
        if config.sandwich_norm:
            self.attention_post_norm = Norm(hidden, config)
            self.feed_forward_post_norm = Norm(hidden, config)
        self._declare_second_half()

    def _declare_second_half(self) -> None:
        config = self.config
        self.feed_forward = FeedForward(
            config.intermediate_size, config, self.compute, bias=config.mlp_bias
        )

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array | None]:
        """Apply the layer to the residual stream `x` [B, S, H].

        Returns:
            The stream after the layer, and its experts' load-balancing loss of each sequence: [B],
            in at least float32, or None for a dense layer.
        """
        parallelism, rate = self.compute.parallelism, self.config.dropout
        keys: tuple[jax.Array | None, ...] = (None, None)
        if (key := context.key) is not None:
            assert context.layer is not None, "layers have masks of their own"
            keys = tuple(jax.random.split(key))
        positions = stream_positions(context.sequence_positions, parallelism, dim=0)

        def added(
            parts: Sequence[jax.Array],
            branches: Sequence[jax.Array],
            name: str,
            key: jax.Array | None,
        ) -> tuple[jax.Array, ...]:
            if self.config.sandwich_norm:
                # The backward pass keeps what the norm reads.
                branches = [computed_twice(getattr(self, name))(each) for each in branches]
            places = split_stream(positions, parallelism, dim=0)
            return tuple(
                part + dropout(branch, key, context.sequence_indices, place, rate)
                for part, branch, place in zip(parts, branches, places, strict=True)
            )

        parts = split_stream(x, parallelism)
        with jax.named_scope("attention"):
            branches = self.attention.of_parts(parts, context, self.attention_norm)
        parts = added(parts, branches, "attention_post_norm", keys[0])
        segment_ids = context.segment_ids
        if segment_ids is not None:
            segment_ids = stream_positions(segment_ids, parallelism, dim=1)

        @keep_products
        @jax.named_scope("feed_forward")
        def second_half(
            parts: Sequence[jax.Array], segment_ids: jax.Array | None
        ) -> tuple[Sequence[jax.Array], jax.Array | None]:
            of_stream = context._replace(segment_ids=segment_ids, sequence_positions=positions)
            return self._second_half(tuple(map(self.feed_forward_norm, parts)), of_stream)

        branches, aux_loss = second_half(parts, segment_ids)
        return join_stream(added(parts, branches, "feed_forward_post_norm", keys[1])), aux_loss

    def _second_half(
        self, normed: Sequence[jax.Array], of_stream: LayerContext
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        """Compute what the second half adds to parts of the stream, and its load-balancing loss.

        `of_stream` has the segment ids and positions of the whole stream alone.
        """
        return self.feed_forward.of_parts(normed, of_stream), None


class ExpertBlock(Block, MoE):
    """A layer whose second half is a mixture of experts, which lie beside its attention."""

    supports: ClassVar[frozenset[str]] = Block.supports | {"expert"}

    def _declare_second_half(self) -> None:
        MoE.__init__(self, self.config, self.compute)

    def _second_half(
        self, normed: Sequence[jax.Array], of_stream: LayerContext
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        # All tokens meet the router and the experts' capacity at once.
        made, aux_loss = MoE.__call__(self, join_stream(normed), of_stream)
        return split_stream(made, self.compute.parallelism), aux_loss


def block_of(
    config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE, *, with_experts: bool
) -> Block:
    """Make a layer with experts or without; a family may have blocks of its own."""
    return (ExpertBlock if with_experts else config.block_class or Block)(config, compute)
