"""The dense feed-forward block and the linear map, as functions on plain parameter trees."""

import jax
import jax.numpy as jnp

from geojax.models.config import ModelConfig
from geojax.models.norm import norm
from geojax.models.parallelism import ALONE, Parallelism
from geojax.models.parameters import Parameters
from geojax.models.tensor_parallel import enter, leave


def linear(parameters: Parameters, x: jax.Array, parallelism: Parallelism = ALONE) -> jax.Array:
    """`x` [..., inputs] times the kernel [inputs, outputs], plus the bias if there is one.

    With a `parallelism` of several `tensor` ranks these hold the rows of one kernel and add up
    their products, before the bias (see `geojax.models.tensor_parallel.leave`).
    """
    # One contracting dim: XLA for CPUs transposes its operands to contract over two, which made the
    # kernel's gradient, a contraction over rows and sequence, up to twice as slow.
    tokens = x.reshape(-1, x.shape[-1])
    product = leave((tokens @ parameters["kernel"]).reshape(*x.shape[:-1], -1), parallelism)
    if "bias" not in parameters:
        return product
    # Wide, so that the bias's gradient, a sum over all tokens, is wide too.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (product.astype(wide) + parameters["bias"].astype(wide)).astype(x.dtype)


def activate(up: jax.Array, gate: jax.Array | None, config: ModelConfig) -> jax.Array:
    """The activation of `config`, element by element, in the dtype of `up`.

    GELU (Hendrycks and Gimpel 2016, the tanh form), squared ReLU (So et al. 2021, "Primer"), or
    SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer").

    Args:
        up: the first product.
        gate: in the shape of `up`, the product beside it; None where the activation has no gate.
        config: the model.
    """
    if config.activation == "swiglu":
        assert gate is not None, "SwiGLU has a gate"
        return jax.nn.silu(gate) * up
    if config.activation == "squared_relu":
        return jnp.square(jax.nn.relu(up))
    return jax.nn.gelu(up, approximate=True)


def activated(parameters: Parameters, x: jax.Array, config: ModelConfig) -> jax.Array:
    """What goes into the last product of a feed-forward block: [..., feed_forward].

    `parameters` hold the block's up and perhaps gate; `x` is [..., hidden].
    """
    gate = linear(parameters["gate"], x) if config.gated else None
    return activate(linear(parameters["up"], x), gate, config)


def feed_forward_block(
    parameters: Parameters,
    x: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = ALONE,
) -> jax.Array:
    """What the feed-forward block adds to the stream `x` [rows, columns, hidden].

    `parameters` are a layer's: the block reads its feed_forward_norm and feed_forward.
    """
    normed = enter(norm(parameters["feed_forward_norm"], x, config), parallelism)
    own = parameters["feed_forward"]
    return linear(own["down"], activated(own, normed, config), parallelism)
