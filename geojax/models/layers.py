"""The parts of a transformer layer, as functions on plain parameter trees."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from geojax.models.attention import attention
from geojax.models.config import ModelConfig
from geojax.models.dropout import dropout
from geojax.models.norm import norm
from geojax.models.parameters import Parameters
from geojax.models.rotary import rotary_table, rotate

# The backward pass keeps the results of matrix products and recomputes what lies between them. That
# halves the memory of a layer and, since recomputing element by element is cheaper than a round
# trip through memory, it also takes less time (7% of a step on a CPU).
_keep_products = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
)


class Context(NamedTuple):
    """What every layer needs to know of the batch, the same for all of them."""

    segment_ids: jax.Array | None
    """int32 [rows, sequence]; attention stays inside a segment. None: each row is one segment."""
    rotary: tuple[jax.Array, jax.Array] | None
    """Cosines and sines of the positions; None where positions are learned."""
    rows: jax.Array
    """int32 [rows], the rows' indices in the global batch."""
    dropout_key: jax.Array | None
    """Holds seed and step; None: no dropout."""


def make_context(
    batch: dict[str, jax.Array],
    config: ModelConfig,
    dtype: jnp.dtype,
    dropout_key: jax.Array | None = None,
) -> Context:
    """The context of a batch, for layers that compute in `dtype`."""
    rotary = None
    if config.positions == "rotary":
        rotary = rotary_table(batch["positions"], config, dtype)
    key = dropout_key if config.dropout > 0 else None
    return Context(batch["segment_ids"], rotary, batch["row"], key)


def linear(parameters: Parameters, x: jax.Array) -> jax.Array:
    """`x` [..., inputs] times the kernel [inputs, outputs], plus the bias if there is one."""
    # One contracting dim: XLA for CPUs transposes its operands to contract over two, which made the
    # kernel's gradient, a contraction over rows and sequence, up to twice as slow.
    tokens = x.reshape(-1, x.shape[-1])
    product = (tokens @ parameters["kernel"]).reshape(*x.shape[:-1], -1)
    if "bias" not in parameters:
        return product
    # Wide, so that the bias's gradient, a sum over all tokens, is wide too.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (product.astype(wide) + parameters["bias"].astype(wide)).astype(x.dtype)


def attention_block(
    parameters: Parameters,
    x: jax.Array,
    context: Context,
    config: ModelConfig,
    implementation: str = "auto",
) -> jax.Array:
    """What causal grouped-query self-attention adds to the stream `x` [rows, sequence, hidden].

    `parameters` are a layer's: the block reads its attention_norm and attention.
    """
    project = _keep_products(functools.partial(project_heads, config=config))
    query, key, value = project(parameters, x, context.rotary)
    mixed = attention(query, key, value, context.segment_ids, implementation=implementation)
    return linear(parameters["attention"]["output"], mixed.reshape(*x.shape[:2], -1))


def project_heads(
    parameters: Parameters,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a layer's attention reads, from the residual stream `x` [rows, sequence, hidden].

    Returns:
        Query [rows, sequence, heads, head_dim], key and value [rows, sequence, key_value_heads,
        head_dim]; query and key turned by their positions where those are rotary.
    """
    normed = norm(parameters["attention_norm"], x, config)
    query, key, value = (
        linear(parameters["attention"][name], normed).reshape(*x.shape[:2], -1, config.head_size)
        for name in ("query", "key", "value")
    )
    if rotary is not None:
        query, key = rotate(query, rotary), rotate(key, rotary)
    return query, key, value


def feed_forward_block(parameters: Parameters, x: jax.Array, config: ModelConfig) -> jax.Array:
    """What the feed-forward block of `config.activation` adds to the stream `x` [..., hidden].

    GELU (Hendrycks and Gimpel 2016, the tanh form), squared ReLU (So et al. 2021, "Primer"), or
    SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"). `parameters` are a layer's: the block
    reads its feed_forward_norm and feed_forward.
    """
    normed = norm(parameters["feed_forward_norm"], x, config)
    own = parameters["feed_forward"]
    up = linear(own["up"], normed)
    if config.activation == "swiglu":
        middle = jax.nn.silu(linear(own["gate"], normed)) * up
    elif config.activation == "squared_relu":
        middle = jnp.square(jax.nn.relu(up))
    else:
        middle = jax.nn.gelu(up, approximate=True)
    return linear(own["down"], middle)


def layer(
    parameters: Parameters,
    x: jax.Array,
    index: jax.Array,
    context: Context,
    config: ModelConfig,
    implementation: str = "auto",
) -> jax.Array:
    """One pre-norm layer on the residual stream `x` [rows, sequence, hidden].

    Args:
        parameters: the layer's own, without the leading layers dim.
        x: the residual stream.
        index: int32 [], the layer's number in the whole model, from 0 (for dropout).
        context: what the batch says.
        config: the model.
        implementation: of attention.
    """
    keys: tuple[jax.Array | None, ...] = (None, None)
    if context.dropout_key is not None:
        layer_key = jax.random.fold_in(context.dropout_key, index + 1)  # 0 is the embedding's
        keys = tuple(jax.random.split(layer_key))
    branch = attention_block(parameters, x, context, config, implementation)
    x = x + dropout(branch, keys[0], context.rows, config.dropout)
    feed_forward = _keep_products(functools.partial(feed_forward_block, config=config))
    branch = feed_forward(parameters, x)
    return x + dropout(branch, keys[1], context.rows, config.dropout)
