"""Dense feed-forward block and linear layer, as functions on plain parameter trees.

Shapes: B batch, S sequence, H hidden, F ffn.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from geojax.models.config import ModelConfig
from geojax.models.lora import LORA_A, adapter_product
from geojax.models.norm import norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.tensor import copy_to_tp_region, reduce_from_tp_region
from geojax.models.parameters import Parameters
from geojax.precision import NO_FP8, Axes, LinearMatmul, saveable

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}

KernelSharding = Literal["columns", "rows"]
"""Dim of a kernel that is sharded over `tensor`: "columns", each rank computes some of the outputs;
"rows", the ranks' outputs have to be summed."""


def linear(
    parameters: Parameters,
    x: jax.Array,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
    *,
    sharding: KernelSharding = "columns",
) -> jax.Array:
    """Multiply `x` [..., inputs] by the kernel [inputs, outputs] and add the bias if there is one.

    With `sharding="rows"` the results are summed over `tensor` before the bias (see
    `geojax.models.parallel.tensor.reduce_from_tp_region`).
    """
    product = times_kernel(parameters, x, parallelism, matmul, sharding=sharding)
    if sharding == "rows":
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
    sharding: KernelSharding,
) -> jax.Array:
    """Multiply `x` [..., inputs] by this rank's part of the kernel; returns [..., outputs].

    What the layer's scaled adapter adds, if it has one, is added.
    """
    # One contracting dim: XLA for CPUs transposes its operands to contract over two, which made the
    # kernel's gradient, a contraction over rows and sequence, up to twice as slow.
    tokens = x.reshape(-1, x.shape[-1])
    axes = operand_axes(parallelism, sharding)
    product = matmul.multiply(tokens, parameters["kernel"], parameters.get("amax"), axes)
    if LORA_A in parameters:
        product = saveable(product + adapter_product(parameters, tokens))
    return product.reshape(*x.shape[:-1], -1)


def operand_axes(parallelism: Parallelism, sharding: KernelSharding) -> Axes:
    """Return the axes over which the operands of a linear layer's matmul are sharded."""
    tensor = ("tensor",) if parallelism.tensor > 1 else ()
    context = ("context",) if parallelism.context > 1 else ()
    if sharding == "rows":
        return Axes(x=(*context, *tensor), w=tensor, dy=context)
    return Axes(x=context, w=tensor, dy=(*context, *tensor))


def activate(up: jax.Array, gate: jax.Array | None, config: ModelConfig) -> jax.Array:
    """Apply the activation of `config` element by element, in the dtype of `up`.

    GELU (Hendrycks and Gimpel 2016, the tanh form), squared ReLU (So et al. 2021, "Primer") or
    SiLU; with a gate (Shazeer 2020, "GLU Variants Improve Transformer") or without; with
    `swiglu_limit` SwiGLU as in OpenAI's gpt-oss (arXiv:2508.10925, section 2.2, and the code
    published with it).

    Args:
        up: the result of the up projection.
        gate: the result of the gate projection; None where there is none.
        config: the model.
    """
    if (limit := config.swiglu_limit) is not None:
        assert gate is not None, "SwiGLU has a gate"
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(config.swiglu_alpha * gate)
    activation = _ACTIVATIONS[config.hidden_act]
    return activation(up) if gate is None else activation(gate) * up


def activated(
    parameters: Parameters,
    x: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> jax.Array:
    """Compute the input [..., F] of a feed-forward block's down projection from `x` [..., H].

    `parameters` hold the block's up and perhaps gate.
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
    """Compute the feed-forward block's contribution to the residual stream `x` [B, S, H].

    `parameters` are a layer's: the block reads its feed_forward_norm and feed_forward.
    """
    normed = copy_to_tp_region(norm(parameters["feed_forward_norm"], x, config), parallelism)
    own = parameters["feed_forward"]
    middle = activated(own, normed, config, parallelism, matmul)
    return linear(own["down"], middle, parallelism, matmul, sharding="rows")
