"""Blocks of a transformer layer, as functions on plain parameter trees.

Shapes: B batch, S sequence, H hidden, N heads, K kv heads, D head dim. With sequence parallelism
the residual stream has S / tensor positions.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from geojax.models.attention import attention
from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters, normal, parameter
from geojax.models.dropout import dropout
from geojax.models.feed_forward import FeedForward, Linear, feed_forward_block, linear
from geojax.models.latent_attention import LatentAttention, project_latent_heads
from geojax.models.lora import LORA_B, scale_adapters
from geojax.models.moe import SAVEABLE_MOE, moe_block
from geojax.models.moe.router import Router
from geojax.models.norm import Norm, norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.sequence_order import local_positions
from geojax.models.parallel.tensor import TP_COPIED, copy_to_tp_region, stream_positions
from geojax.models.rotary import rotary_table, rotate, score_scale
from geojax.precision import NO_FP8, SAVEABLE_MATMULS, LinearMatmul

# The backward pass keeps the results of matmuls and recomputes the element-wise operations between
# them. That halves the memory of a layer and, since recomputing is cheaper than a round trip to
# memory, it also takes less time (7% of a step on a CPU). Results of collectives are kept too.
_keep_products = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    policy=jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(TP_COPIED, *SAVEABLE_MOE, *SAVEABLE_MATMULS),
    ),
)


class Attention(nnx.Module):
    """The projections of attention, its norms of queries and keys, and its sinks."""

    def __init__(self, config: ModelConfig):
        hidden, heads, width = config.hidden_size, config.num_key_value_heads, config.head_dim
        of_queries, bias = config.num_attention_heads * width, config.attention_output_bias
        project = functools.partial(
            Linear, hidden, config=config, sharding="columns", bias=config.qkv_bias
        )
        self.query = project(of_queries, target="q_proj")
        self.key = project(heads * width, heads=heads, target="k_proj")
        self.value = project(heads * width, heads=heads, target="v_proj")
        self.output = Linear(
            of_queries, hidden, config, sharding="rows", bias=bias, target="o_proj"
        )
        if config.use_qk_norm:
            self.query_norm = Norm(width, config, of_heads=True, has_bias=False)
            self.key_norm = Norm(width, config, of_heads=True, has_bias=False)
        if config.use_attention_sinks:
            initial = normal(config.initializer_range)
            self.sinks = parameter((config.num_attention_heads,), initial, axes=("tensor",))


class Block(nnx.Module):
    """A layer: attention, and a feed-forward block or experts."""

    def __init__(self, config: ModelConfig, *, with_experts: bool):
        hidden = config.hidden_size
        self.attention_norm = Norm(hidden, config)
        self.attention = (
            LatentAttention(config) if config.has_latent_attention else Attention(config)
        )
        self.feed_forward_norm = Norm(hidden, config)
        if config.sandwich_norm:
            self.attention_post_norm = Norm(hidden, config)
            self.feed_forward_post_norm = Norm(hidden, config)
        if not with_experts:
            self.feed_forward = FeedForward(config.intermediate_size, config, bias=config.mlp_bias)
            return
        self.router = Router(config)
        self.experts = FeedForward(
            config.moe_intermediate_size, config, bias=config.moe_bias, experts=config.num_experts
        )
        if config.n_shared_experts:
            self.shared_experts = FeedForward(config.shared_expert_intermediate_size, config)


class LayerContext(NamedTuple):
    """Data of the batch that every layer reads."""

    segment_ids: jax.Array | None
    """int32 [B, S]; attention stays inside a segment. None: each sequence is one segment."""
    rotary: tuple[jax.Array, jax.Array] | None
    """Cosines and sines of the positions; None where positions are learned."""
    local_rotary: tuple[jax.Array, jax.Array] | None
    """Cosines and sines of layers with a window; None: they are the same."""
    sequence_indices: jax.Array
    """int32 [B], the sequences' indices in the global batch."""
    positions: jax.Array
    """int32 [S], the positions in the sequence that this rank's share of the batch holds (with
    sequence parallelism the residual stream has a part of them)."""
    dropout_key: jax.Array | None
    """Key that holds seed and step; None: no dropout."""


def make_context(
    batch: dict[str, jax.Array],
    config: ModelConfig,
    dtype: jnp.dtype,
    dropout_key: jax.Array | None = None,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> LayerContext:
    """Make the context of a batch, for layers that compute in `dtype`."""
    rotary, local_rotary = rotary_tables(batch["positions"], config, dtype)
    key = dropout_key if config.dropout > 0 else None
    positions = local_positions(batch["tokens"].shape[1], parallelism)
    return LayerContext(batch["segment_ids"], rotary, local_rotary, batch["row"], positions, key)


def rotary_tables(
    positions: jax.Array, config: ModelConfig, dtype: jnp.dtype
) -> tuple[tuple[jax.Array, jax.Array] | None, tuple[jax.Array, jax.Array] | None]:
    """Make `rotary` and `local_rotary` of a `LayerContext` for `positions` int32 [B, S]."""
    if config.position_embedding_type != "rope":
        return None, None
    rotary = rotary_table(positions, config, dtype)
    if config.local_rope_parameters is None:
        return rotary, None
    local = config.model_copy(update={"rope_parameters": config.local_rope_parameters})
    return rotary, rotary_table(positions, local, dtype)


def layer_rotary(
    rotary: tuple[jax.Array, jax.Array] | None,
    local_rotary: tuple[jax.Array, jax.Array] | None,
    index: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array] | None:
    """Choose the cosines and sines of layer `index`: of a layer with a window `local_rotary`."""
    if local_rotary is None:
        return rotary
    windowed = is_windowed(index, config)
    if windowed is None:
        return local_rotary
    return jax.tree.map(functools.partial(jnp.where, windowed), local_rotary, rotary)


def attention_block(
    parameters: Parameters,
    x: jax.Array,
    index: jax.Array,
    context: LayerContext,
    config: ModelConfig,
    implementation: str = "auto",
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> jax.Array:
    """Compute the contribution of causal self-attention to the stream `x` [B, S, H].

    `parameters` are those of layer `index`: the block reads its attention_norm and attention.
    """
    project = _keep_products(
        functools.partial(project_heads, config=config, parallelism=parallelism, matmul=matmul)
    )
    rotary = layer_rotary(context.rotary, context.local_rotary, index, config)
    query, key, value = project(parameters, x, rotary)
    mixed = attention(
        query,
        key,
        value,
        context.segment_ids,
        implementation=implementation,
        scale=score_scale(config),
        softcap=config.attn_logit_softcapping,
        window=config.sliding_window,
        is_windowed=is_windowed(index, config),
        sinks=attention_sinks(parameters),
        parallelism=parallelism,
    )
    added = _put_together(parameters["attention"]["output"], mixed, matmul, parallelism)
    return post_norm(parameters, "attention_post_norm", added, config)


def is_windowed(index: jax.Array, config: ModelConfig) -> jax.Array | None:
    """Return True, bool [], if layer `index` has a window; None: all layers are alike.

    Layers that differ in nothing but the window are computed by one program, which is told by data.
    """
    period = config.has_window
    return jnp.asarray(period)[index % len(period)] if len(period) > 1 else None


def attention_sinks(parameters: Parameters) -> jax.Array | None:
    """Return the sinks of a layer's heads on this rank, [N] in at least float32; None: no sinks."""
    sinks = parameters["attention"].get("sinks")
    return None if sinks is None else sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32))


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _put_together(
    parameters: Parameters, mixed: jax.Array, matmul: LinearMatmul, parallelism: Parallelism
) -> jax.Array:
    """Apply the output projection to the heads [B, S, N, D].

    Attention already keeps its result, so it is not kept once more in another shape.
    """
    heads = mixed.reshape(*mixed.shape[:2], -1)
    return linear(parameters, heads, parallelism, matmul, sharding="rows")


def post_norm(
    parameters: Parameters, name: str, branch: jax.Array, config: ModelConfig
) -> jax.Array:
    """Normalize what a block adds to the stream, if the model does, by the layer's norm `name`.

    The backward pass keeps what the norm reads and computes it again.
    """
    if not config.sandwich_norm:
        return branch
    apply = functools.partial(norm, config=config)
    return jax.checkpoint(apply, prevent_cse=False)(parameters[name], branch)


def project_heads(
    parameters: Parameters,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Project the residual stream `x` [B, S, H] to query, key and value.

    Returns:
        Query [B, S, N, D], key and value [B, S, K, D] (of latent attention see
        `project_latent_heads`); query and key normed with `use_qk_norm`, and rotated by their
        positions where those are rotary. With tensor parallelism these are this rank's heads (at
        least one of keys and values), of all positions.
    """
    if config.has_latent_attention:
        assert rotary is not None, "latent attention has rotary positions"
        return project_latent_heads(parameters, x, rotary, config, parallelism, matmul)
    normed = copy_to_tp_region(norm(parameters["attention_norm"], x, config), parallelism)
    own = parameters["attention"]
    if config.num_key_value_heads < parallelism.tensor:
        own = own | {name: _own_head(own[name], config, parallelism) for name in ("key", "value")}
    query, key, value = (
        linear(own[name], normed, parallelism, matmul).reshape(
            *normed.shape[:2], -1, config.head_dim
        )
        for name in ("query", "key", "value")
    )
    if config.use_qk_norm:
        query, key = norm(own["query_norm"], query, config), norm(own["key_norm"], key, config)
    if rotary is not None:
        query, key = rotate(query, rotary), rotate(key, rotary)
    return query, key, value


def _own_head(parameters: Parameters, config: ModelConfig, parallelism: Parallelism) -> Parameters:
    """Slice the one key or value head that this rank's queries read out of the whole kernel."""
    ranks_of_a_head = parallelism.tensor // config.num_key_value_heads
    first = lax.axis_index("tensor") // ranks_of_a_head * config.head_dim

    def of_head(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 0:  # the scale of a quantized kernel, the same for all heads
            return leaf
        return lax.dynamic_slice_in_dim(leaf, first, config.head_dim, axis=-1)

    own = {name: parameters[name] for name in ("kernel", "bias", LORA_B) if name in parameters}
    return parameters | jax.tree.map(of_head, own)


def second_block(
    parameters: Parameters,
    x: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the contribution of a layer's feed-forward block: dense or of experts.

    Args:
        parameters: the layer's own.
        x: [B, S, H], the stream.
        segment_ids: int32 [B, S] of the stream's positions, 0 for padding; None: no padding.
        positions: int32 [S], the stream's positions in the sequence.
        config: the model.
        parallelism: how model and sequences are sharded.
        matmul: matmul of the linear layers.

    Returns:
        [B, S, H], and the experts' load-balancing loss [B], None for a dense block.
    """
    if "feed_forward" in parameters:
        return feed_forward_block(parameters, x, config, parallelism, matmul), None
    return moe_block(parameters, x, segment_ids, positions, config, parallelism, matmul)


def layer(
    parameters: Parameters,
    x: jax.Array,
    index: jax.Array,
    context: LayerContext,
    config: ModelConfig,
    implementation: str = "auto",
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> tuple[jax.Array, jax.Array | None]:
    """Apply one layer to the residual stream `x` [B, S, H].

    Args:
        parameters: the layer's own, without the leading layers dim.
        x: the residual stream.
        index: int32 [], the layer's number in the whole model, from 0 (for dropout and windows).
        context: data of the batch.
        config: the model.
        implementation: implementation of attention.
        parallelism: how model and sequences are sharded; `parameters` are this rank's shards.
        matmul: matmul of the linear layers.

    Returns:
        The stream after the layer, and its experts' load-balancing loss of each sequence: [B], in
        at least float32, or None for a dense layer.
    """
    if config.lora is not None:
        parameters = scale_adapters(parameters, config.lora)
    keys: tuple[jax.Array | None, ...] = (None, None)
    if context.dropout_key is not None:
        layer_key = jax.random.fold_in(context.dropout_key, index + 1)  # 0 is the embedding's
        keys = tuple(jax.random.split(layer_key))
    positions = stream_positions(context.positions, parallelism, dim=0)
    branch = attention_block(
        parameters, x, index, context, config, implementation, parallelism, matmul
    )
    x = x + dropout(branch, keys[0], context.sequence_indices, positions, config.dropout)
    segment_ids = context.segment_ids
    if segment_ids is not None:
        segment_ids = stream_positions(segment_ids, parallelism, dim=1)
    second = _keep_products(
        functools.partial(second_block, config=config, parallelism=parallelism, matmul=matmul)
    )
    branch, aux_loss = second(parameters, x, segment_ids, positions)
    branch = post_norm(parameters, "feed_forward_post_norm", branch, config)
    return x + dropout(
        branch, keys[1], context.sequence_indices, positions, config.dropout
    ), aux_loss
