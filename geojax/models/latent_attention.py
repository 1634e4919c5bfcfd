"""Multi-head latent attention: queries, keys and values made of two narrow latents of a token.

    stream ─► norm ─┬─► query_down ─► norm ─► query ──────────────► query, P of D dims rotated
                    └─► key_value_down ─┬─► norm ─► key_value ─┬──► value
                                        │                      └──► key, its first D - P dims
                                        └─► rotated ─────────────► key, its last P dims, all heads'

The latents are made where the stream lies, with sequence parallelism of a rank's own positions, and
enter the tensor-parallel region in the stream's place: q + r + P numbers a token are sent, and not
H. Without q the queries are projections of the normed stream, which is sent beside the other latent
in the same message. Source: "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts
Language Model" (2024), section 2.1.

Shapes: B batch, S sequence, H hidden, N heads, D dims of a query or key, P of them rotated, W dims
of a value, q and r dims of the latents.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings, LayerContext
from geojax.models.layers import Linear, Norm, enter
from geojax.models.parallel.tensor import join_stream
from geojax.models.rotary import rotate
from geojax.models.self_attention import RotaryTable, SelfAttention


class LatentAttention(SelfAttention):
    """Self-attention of heads that are made of latents.

    The latents are computed in the compute dtype, also under FP8: they are few, and a rank of
    `tensor` has all of them.
    """

    def __init__(self, config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE):
        super().__init__(config, compute)
        hidden, heads = config.hidden_size, config.num_attention_heads
        bias, eps = config.attention_output_bias, config.latent_norm_eps
        latent, of_query = config.kv_lora_rank, config.q_lora_rank
        layer = functools.partial(Linear, config=config, compute=compute)
        columns = functools.partial(layer, sharding="columns")
        self.query = columns(of_query or hidden, heads * config.head_dim, target="q_proj")
        if of_query:
            self.query_down = layer(hidden, of_query, fp8=False)
            self.query_down_norm = Norm(of_query, config, eps=eps, has_bias=False)
        self.key_value_down = layer(hidden, latent + config.qk_rope_head_dim, fp8=False)
        self.key_value_down_norm = Norm(latent, config, eps=eps, has_bias=False)
        self.key_value = columns(latent, heads * (config.qk_nope_head_dim + config.v_head_dim))
        width = heads * config.v_head_dim
        self.output = layer(width, hidden, sharding="rows", bias=bias, target="o_proj")

    def project(
        self, normed: Sequence[jax.Array], rotary: RotaryTable | None, context: LayerContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `SelfAttention.project`; keys and values have as many heads as queries."""
        assert rotary is not None, "latent attention has rotary positions"
        config, stream = self.config, join_stream(normed)  # so few numbers travel in one message
        of_query = stream
        if config.q_lora_rank:
            of_query = self.query_down_norm(self.query_down(stream))
        made = self.key_value_down(stream)
        of_keys = self.key_value_down_norm(made[..., : config.kv_lora_rank])
        ends = (of_query.shape[-1], of_query.shape[-1] + config.kv_lora_rank)
        latents = jnp.concatenate([of_query, of_keys, made[..., config.kv_lora_rank :]], axis=-1)
        (entered,), layers = enter((latents,), (self.query, self.key_value))
        of_query, of_keys, rotated = jnp.split(entered, ends, axis=-1)

        def heads(layer: Linear, latent: jax.Array, width: int) -> jax.Array:
            made = layer(latent, context)
            return made.reshape(*made.shape[:2], -1, width)

        plain = config.qk_nope_head_dim
        turn = functools.partial(rotate, table=rotary, interleaved=config.rope_interleave)
        query = heads(layers[0], of_query, config.head_dim)
        key_value = heads(layers[1], of_keys, plain + config.v_head_dim)
        query = jnp.concatenate([query[..., :plain], turn(query[..., plain:])], axis=-1)
        of_head = key_value[..., :plain]
        shared = jnp.broadcast_to(
            turn(rotated[:, :, None]), (*of_head.shape[:3], config.qk_rope_head_dim)
        )
        key = jnp.concatenate([of_head, shared], axis=-1)
        return query, key, key_value[..., plain:]
