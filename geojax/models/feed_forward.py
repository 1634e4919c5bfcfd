"""Dense feed-forward block and linear layer, as functions on plain parameter trees.

Shapes: B batch, S sequence, H hidden, F ffn.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters, constant, normal, parameter
from geojax.models.lora import LORA_A, TargetModule, adapter_product, draw_lora_a
from geojax.models.norm import norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.tensor import copy_to_tp_region, reduce_from_tp_region
from geojax.precision import NO_FP8, Axes, LinearMatmul, saveable

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}

KernelSharding = Literal["columns", "rows"]
"""Dim of a kernel that is sharded over `tensor`: "columns", each rank computes some of the outputs;
"rows", the ranks' outputs have to be summed."""


class Linear(nnx.Module):
    """A linear layer: a kernel [inputs, outputs], perhaps with a bias and an adapter.

    Args:
        inputs: size of the last dim that it reads.
        outputs: size of the last dim that it makes.
        config: the model.
        sharding: dim of the kernel that `tensor` shards; None: none. The outputs of "rows" are
            added to the residual stream: they begin with 1 / sqrt(2 layers) of the deviation, as in
            GPT-2 and Megatron-LM.
        bias: True if it has one.
        fp8: True if a layer's recipe is followed.
        heads: see `Declaration`.
        experts: number of experts, each with a kernel of its own; 0: no experts.
        target: name of the layer among those that may have an adapter.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: ModelConfig,
        *,
        sharding: KernelSharding | None = None,
        bias: bool = False,
        fp8: bool = True,
        heads: int | None = None,
        experts: int = 0,
        target: TargetModule | None = None,
    ):
        deviation = config.initializer_range
        if sharding == "rows":
            deviation /= math.sqrt(2 * config.num_hidden_layers)
        rows = "tensor" if sharding == "rows" else None
        columns = "tensor" if sharding == "columns" else None
        stack, of_stack = ((experts,), ("expert",)) if experts else ((), ())
        declare = functools.partial(parameter, heads=heads)
        shape, axes = (*stack, inputs, outputs), (*of_stack, rows, columns)
        self.kernel = declare(shape, normal(deviation), axes=axes, fp8=fp8)
        if bias:
            # That of experts' outputs comes from one rank, before the ranks' outputs are summed.
            shape, axes = (*stack, outputs), (*of_stack, columns)
            self.bias = declare(shape, constant(0.0), axes=axes, in_parts=experts > 0)
        if config.lora is not None and target in config.lora.targets and not experts:
            # One is sharded as the kernel is, and the other is met in parts.
            declare, rank = functools.partial(declare, in_parts=True), config.lora.rank
            self.lora_a = declare((inputs, rank), draw_lora_a, axes=(rows, None))
            self.lora_b = declare((rank, outputs), constant(0.0), axes=(None, columns))


class FeedForward(nnx.Module):
    """A feed-forward block: up, perhaps a gate, and down.

    Args:
        width: numbers between them.
        config: the model.
        bias: True if its layers have biases.
        experts: number of experts, each a block of its own; 0: no experts.
    """

    def __init__(self, width: int, config: ModelConfig, *, bias: bool = False, experts: int = 0):
        hidden = config.hidden_size
        layer = functools.partial(Linear, config=config, bias=bias, experts=experts)
        self.up = layer(hidden, width, sharding="columns", target="up_proj")
        if config.gated:
            self.gate = layer(hidden, width, sharding="columns", target="gate_proj")
        self.down = layer(width, hidden, sharding="rows", target="down_proj")


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
