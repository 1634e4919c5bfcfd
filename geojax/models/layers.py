"""The parts of a transformer layer, as functions on plain parameter trees."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.attention import attention
from geojax.models.config import ModelConfig
from geojax.models.dropout import dropout
from geojax.models.feed_forward import feed_forward_block, linear
from geojax.models.moe import SAVEABLE_MOE, moe_block
from geojax.models.norm import norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.sequence_order import local_positions
from geojax.models.parallel.tensor import TP_COPIED, copy_to_tp_region, stream_positions
from geojax.models.parameters import Parameters
from geojax.models.rotary import rotary_table, rotate
from geojax.precision import NO_FP8, SAVEABLE_MATMULS, LinearMatmul

# The backward pass keeps the results of matrix products and recomputes what lies between them. That
# halves the memory of a layer and, since recomputing element by element is cheaper than a round
# trip through memory, it also takes less time (7% of a step on a CPU). What came over the network
# is kept too.
_keep_products = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    policy=jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(TP_COPIED, *SAVEABLE_MOE, *SAVEABLE_MATMULS),
    ),
)


class LayerContext(NamedTuple):
    """What every layer needs to know of the batch, the same for all of them."""

    segment_ids: jax.Array | None
    """int32 [rows, columns]; attention stays inside a segment. None: each row is one segment."""
    rotary: tuple[jax.Array, jax.Array] | None
    """Cosines and sines of the positions; None where positions are learned."""
    rows: jax.Array
    """int32 [rows], the rows' indices in the global batch."""
    columns: jax.Array
    """int32 [columns], the positions in the row of the columns that this rank's share of the batch
    holds (with sequence parallelism the residual stream has a part of them)."""
    dropout_key: jax.Array | None
    """Holds seed and step; None: no dropout."""


def make_context(
    batch: dict[str, jax.Array],
    config: ModelConfig,
    dtype: jnp.dtype,
    dropout_key: jax.Array | None = None,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> LayerContext:
    """The context of a batch, for layers that compute in `dtype`."""
    rotary = None
    if config.position_embedding_type == "rope":
        rotary = rotary_table(batch["positions"], config, dtype)
    key = dropout_key if config.dropout > 0 else None
    columns = local_positions(batch["tokens"].shape[1], parallelism)
    return LayerContext(batch["segment_ids"], rotary, batch["row"], columns, key)


def attention_block(
    parameters: Parameters,
    x: jax.Array,
    context: LayerContext,
    config: ModelConfig,
    implementation: str = "auto",
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> jax.Array:
    """What causal grouped-query self-attention adds to the stream `x` [rows, columns, hidden].

    `parameters` are a layer's: the block reads its attention_norm and attention.
    """
    project = _keep_products(
        functools.partial(project_heads, config=config, parallelism=parallelism, matmul=matmul)
    )
    query, key, value = project(parameters, x, context.rotary)
    mixed = attention(
        query,
        key,
        value,
        context.segment_ids,
        implementation=implementation,
        parallelism=parallelism,
    )
    return _put_together(parameters["attention"]["output"], mixed, matmul, parallelism)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _put_together(
    parameters: Parameters, mixed: jax.Array, matmul: LinearMatmul, parallelism: Parallelism
) -> jax.Array:
    """The heads [rows, columns, heads, head_dim] through the output matrix.

    What attention returns is kept by attention already, and not once more in another shape.
    """
    heads = mixed.reshape(*mixed.shape[:2], -1)
    return linear(parameters, heads, parallelism, matmul, cut="rows")


def project_heads(
    parameters: Parameters,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a layer's attention reads, from the residual stream `x` [rows, columns, hidden].

    Returns:
        Query [rows, columns, heads, head_dim], key and value [rows, columns, key_value_heads,
        head_dim]; query and key turned by their positions where those are rotary. With tensor
        parallelism these are this rank's heads (at least one of keys and values), of all columns.
    """
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
    if rotary is not None:
        query, key = rotate(query, rotary), rotate(key, rotary)
    return query, key, value


def _own_head(parameters: Parameters, config: ModelConfig, parallelism: Parallelism) -> Parameters:
    """The one head that this rank's queries read, of keys or values that it holds whole."""
    ranks_of_a_head = parallelism.tensor // config.num_key_value_heads
    first = lax.axis_index("tensor") // ranks_of_a_head * config.head_dim

    def of_head(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 0:  # of a rounded kernel: a scale, which is that of all heads
            return leaf
        return lax.dynamic_slice_in_dim(leaf, first, config.head_dim, axis=-1)

    own = {name: parameters[name] for name in ("kernel", "bias") if name in parameters}
    return parameters | jax.tree.map(of_head, own)


def second_block(
    parameters: Parameters,
    x: jax.Array,
    segment_ids: jax.Array | None,
    columns: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> tuple[jax.Array, jax.Array | None]:
    """What a layer's second block adds to the stream: the dense feed-forward block or the mixture.

    Args:
        parameters: the layer's own.
        x: [rows, columns, hidden], the stream.
        segment_ids: int32 [rows, columns] of the stream's columns, 0 for padding; None: none is.
        columns: int32 [columns], the positions in the row of the stream's columns.
        config: the model.
        parallelism: how model and rows are spread.
        products: how the linear layers multiply.

    Returns:
        [rows, columns, hidden], and the mixture's balance loss [rows], None where it is dense.
    """
    if not config.is_moe:
        return feed_forward_block(parameters, x, config, parallelism, matmul), None
    return moe_block(parameters, x, segment_ids, columns, config, parallelism, matmul)


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
    """One pre-norm layer on the residual stream `x` [rows, columns, hidden].

    Args:
        parameters: the layer's own, without the leading layers dim.
        x: the residual stream.
        index: int32 [], the layer's number in the whole model, from 0 (for dropout).
        context: what the batch says.
        config: the model.
        implementation: of attention.
        parallelism: how the model and the row are spread; `parameters` are this rank's parts.
        products: how the layer's linear maps multiply.

    Returns:
        The stream after the layer, and the load-balancing loss of its mixture of experts for each
        row: [rows], in at least float32, or None where the layer is dense.
    """
    keys: tuple[jax.Array | None, ...] = (None, None)
    if context.dropout_key is not None:
        layer_key = jax.random.fold_in(context.dropout_key, index + 1)  # 0 is the embedding's
        keys = tuple(jax.random.split(layer_key))
    columns = stream_positions(context.columns, parallelism, dim=0)
    branch = attention_block(parameters, x, context, config, implementation, parallelism, matmul)
    x = x + dropout(branch, keys[0], context.rows, columns, config.dropout)
    segment_ids = context.segment_ids
    if segment_ids is not None:
        segment_ids = stream_positions(segment_ids, parallelism, dim=1)
    second = _keep_products(
        functools.partial(second_block, config=config, parallelism=parallelism, matmul=matmul)
    )
    branch, balance = second(parameters, x, segment_ids, columns)
    return x + dropout(branch, keys[1], context.rows, columns, config.dropout), balance
