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

import jax
import jax.numpy as jnp
from flax import nnx

from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters
from geojax.models.feed_forward import Linear, linear
from geojax.models.norm import Norm, norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.tensor import copy_to_tp_region
from geojax.models.rotary import rotate
from geojax.precision import NO_FP8, LinearMatmul


class LatentAttention(nnx.Module):
    """The projections of latent attention, and the norms of its latents."""

    def __init__(self, config: ModelConfig):
        hidden, heads = config.hidden_size, config.num_attention_heads
        bias = config.attention_output_bias
        latent, of_query = config.kv_lora_rank, config.q_lora_rank
        columns = functools.partial(Linear, config=config, sharding="columns")
        self.query = columns(of_query or hidden, heads * config.head_dim, target="q_proj")
        if of_query:
            self.query_down = Linear(hidden, of_query, config, fp8=False)
            self.query_down_norm = Norm(of_query, config, has_bias=False)
        self.key_value_down = Linear(hidden, latent + config.qk_rope_head_dim, config, fp8=False)
        self.key_value_down_norm = Norm(latent, config, has_bias=False)
        self.key_value = columns(latent, heads * (config.qk_nope_head_dim + config.v_head_dim))
        width = heads * config.v_head_dim
        self.output = Linear(width, hidden, config, sharding="rows", bias=bias, target="o_proj")


def project_latent_heads(
    parameters: Parameters,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Project the residual stream `x` [B, S, H] to query, key and value.

    The latents are computed in the compute dtype, also under FP8: they are few, and a rank of
    `tensor` has all of them.

    Returns:
        Query and key [B, S, N, D], value [B, S, N, W]; with tensor parallelism this rank's heads,
        of all positions.
    """
    own = parameters["attention"]
    normed = norm(parameters["attention_norm"], x, config)
    of_query, eps = normed, config.latent_norm_eps
    if config.q_lora_rank:
        of_query = norm(own["query_down_norm"], linear(own["query_down"], normed), config, eps)
    made = linear(own["key_value_down"], normed)
    of_keys = norm(own["key_value_down_norm"], made[..., : config.kv_lora_rank], config, eps)
    ends = (of_query.shape[-1], of_query.shape[-1] + config.kv_lora_rank)
    latents = jnp.concatenate([of_query, of_keys, made[..., config.kv_lora_rank :]], axis=-1)
    entered = copy_to_tp_region(latents, parallelism)
    of_query, of_keys, rotated = jnp.split(entered, ends, axis=-1)

    def heads(name: str, latent: jax.Array, width: int) -> jax.Array:
        made = linear(own[name], latent, parallelism, matmul)
        return made.reshape(*made.shape[:2], -1, width)

    plain = config.qk_nope_head_dim
    turn = functools.partial(rotate, table=rotary, interleaved=config.rope_interleave)
    query = heads("query", of_query, config.head_dim)
    key_value = heads("key_value", of_keys, plain + config.v_head_dim)
    query = jnp.concatenate([query[..., :plain], turn(query[..., plain:])], axis=-1)
    of_head = key_value[..., :plain]
    shared = jnp.broadcast_to(
        turn(rotated[:, :, None]), (*of_head.shape[:3], config.qk_rope_head_dim)
    )
    key = jnp.concatenate([of_head, shared], axis=-1)
    return query, key, key_value[..., plain:]
