"""The dense feed-forward block and the linear map, as functions on plain parameter trees."""

from typing import Literal

import jax
import jax.numpy as jnp

from geojax.models.config import ModelConfig
from geojax.models.norm import norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.tensor import copy_to_tp_region, reduce_from_tp_region
from geojax.models.parameters import Parameters
from geojax.precision import NO_FP8, Axes, LinearMatmul

Cut = Literal["columns", "rows"]
"""What of a kernel the ranks of `tensor` have parts of: columns, and each makes some of the
outputs; or rows, and what each makes of all outputs has to be summed."""


def linear(
    parameters: Parameters,
    x: jax.Array,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
    *,
    cut: Cut = "columns",
) -> jax.Array:
    """`x` [..., inputs] times the kernel [inputs, outputs], plus the bias if there is one.

    Where the kernel is `cut` by rows the ranks of `tensor` add up their products, before the bias
    (see `geojax.models.parallel.tensor.reduce_from_tp_region`).
    """
    product = times_kernel(parameters, x, parallelism, matmul, cut=cut)
    if cut == "rows":
        product = reduce_from_tp_region(product, parallelism)
    if "bias" not in parameters:
        return product
    # Wide, so that the bias's gradient, a sum over all tokens, is wide too.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (product.astype(wide) + parameters["bias"].astype(wide)).astype(x.dtype)


def times_kernel(
    parameters: Parameters,
    x: jax.Array,
    parallelism: Parallelism,
    matmul: LinearMatmul,
    *,
    cut: Cut,
) -> jax.Array:
    """`x` [..., inputs] times this rank's part of the kernel: [..., outputs]."""
    # One contracting dim: XLA for CPUs transposes its operands to contract over two, which made the
    # kernel's gradient, a contraction over rows and sequence, up to twice as slow.
    tokens = x.reshape(-1, x.shape[-1])
    axes = operand_axes(parallelism, cut)
    product = matmul.multiply(tokens, parameters["kernel"], parameters.get("amax"), axes)
    return product.reshape(*x.shape[:-1], -1)


def operand_axes(parallelism: Parallelism, cut: Cut) -> Axes:
    """Over which axes ranks hold parts of the operands of one product of a layer."""
    tensor = ("tensor",) if parallelism.tensor > 1 else ()
    context = ("context",) if parallelism.context > 1 else ()
    if cut == "rows":
        return Axes(x=(*context, *tensor), w=tensor, dy=context)
    return Axes(x=context, w=tensor, dy=(*context, *tensor))


def activate(up: jax.Array, gate: jax.Array | None, config: ModelConfig) -> jax.Array:
    """The activation of `config`, element by element, in the dtype of `up`.

    GELU (Hendrycks and Gimpel 2016, the tanh form), squared ReLU (So et al. 2021, "Primer"), or
    SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer").

    Args:
        up: the first product.
        gate: in the shape of `up`, the product beside it; None where the activation has no gate.
        config: the model.
    """
    if config.hidden_act == "silu":
        assert gate is not None, "SwiGLU has a gate"
        return jax.nn.silu(gate) * up
    if config.hidden_act == "relu2":
        return jnp.square(jax.nn.relu(up))
    return jax.nn.gelu(up, approximate=True)


def activated(
    parameters: Parameters,
    x: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> jax.Array:
    """What goes into the last product of a feed-forward block: [..., feed_forward].

    `parameters` hold the block's up and perhaps gate; `x` is [..., hidden].
    """
    gate = linear(parameters["gate"], x, parallelism, matmul) if config.gated else None
    return activate(linear(parameters["up"], x, parallelism, matmul), gate, config)


def feed_forward_block(
    parameters: Parameters,
    x: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> jax.Array:
    """What the feed-forward block adds to the stream `x` [rows, columns, hidden].

    `parameters` are a layer's: the block reads its feed_forward_norm and feed_forward.
    """
    normed = copy_to_tp_region(norm(parameters["feed_forward_norm"], x, config), parallelism)
    own = parameters["feed_forward"]
    middle = activated(own, normed, config, parallelism, matmul)
    return linear(own["down"], middle, parallelism, matmul, cut="rows")
