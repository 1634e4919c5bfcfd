"""Layers that models are made of: linear layers, norms, feed-forward blocks and dropout.

Shapes: B batch, S sequence, H hidden, F ffn.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from geojax.collectives.order import together_backwards
from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings, LayerContext
from geojax.models.declaration import constant, normal, parameter
from geojax.models.lora import TargetModule, draw_lora_a
from geojax.models.parallel.entered_products import entered_products
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.tensor import enter_in_parts, join_stream, leave_in_parts, split_stream
from geojax.precision import Axes, merge_quantized, saveable, split_quantized

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}

KernelSharding = Literal["columns", "rows"]
"""Dim of a kernel that is sharded over `tensor`: "columns", each rank computes some of the outputs;
"rows", the ranks' outputs have to be summed."""


class Amax(nnx.Variable):
    """The [3] magnitudes of a linear layer's matmul, of a recipe with a history."""


class Linear(nnx.Module):
    """A linear layer: a kernel [inputs, outputs], perhaps with a bias and an adapter.

    Args:
        inputs: size of the last dim that it reads.
        outputs: size of the last dim that it makes.
        config: the model.
        compute: how it computes.
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
        compute: ComputeSettings = ON_ONE_DEVICE,
        *,
        sharding: KernelSharding | None = None,
        bias: bool = False,
        fp8: bool = True,
        heads: int | None = None,
        experts: int = 0,
        target: TargetModule | None = None,
    ):
        self.compute = compute if fp8 else compute.without_fp8
        self.sharding, self.heads, self.is_trained = sharding, heads, config.lora is None
        deviation = config.initializer_range
        if sharding == "rows":
            deviation /= math.sqrt(2 * config.num_hidden_layers)
        rows = "tensor" if sharding == "rows" else None
        columns = "tensor" if sharding == "columns" else None
        stack, of_stack = ((experts,), ("expert",)) if experts else ((), ())
        declare = functools.partial(parameter, heads=heads)
        shape, axes = (*stack, inputs, outputs), (*of_stack, rows, columns)
        self.kernel = declare(shape, normal(deviation), kind="matrix", axes=axes, fp8=fp8)
        if bias:
            # That of experts' outputs comes from one rank, before the ranks' outputs are summed.
            shape, axes = (*stack, outputs), (*of_stack, columns)
            self.bias = declare(shape, constant(0.0), axes=axes, in_parts=experts > 0)
        if config.lora is not None and target in config.lora.targets and not experts:
            # One is sharded as the kernel is, and the other is met in parts.
            declare = functools.partial(declare, kind="adapter", in_parts=True)
            rank = config.lora.rank
            self.lora_a = declare((inputs, rank), draw_lora_a, axes=(rows, None))
            self.lora_b = declare((rank, outputs), constant(0.0), axes=(None, columns))
        if (recipe := self.compute.matmul.recipe) is not None and recipe.history:
            self.amax = Amax(jax.ShapeDtypeStruct((3,), jnp.float32))

    def __call__(self, x: jax.Array, context: LayerContext | None = None) -> jax.Array:
        """Multiply `x` [..., inputs] by the kernel and add the bias: [..., outputs].

        With `sharding="rows"` the results are summed over `tensor` before the bias (see
        `geojax.models.parallel.tensor.reduce_from_tp_region`).
        """
        return self.of_parts((x,), context)[0]

    def of_parts(
        self,
        parts: Sequence[jax.Array],
        context: LayerContext | None = None,
        *,
        at_once: bool = False,
    ) -> tuple[jax.Array, ...]:
        """Apply the layer to parts of its input one by one: a result for each.

        The gradient of the kernel is one product of all parts. `at_once` is that of
        `leave_in_parts`.
        """
        return self._finished(tuple(self.products(parts, context)), at_once=at_once)

    def _finished(
        self, products: tuple[jax.Array, ...], *, at_once: bool = False
    ) -> tuple[jax.Array, ...]:
        """Sum products over `tensor` if they have to be, and add the bias."""
        if self.sharding == "rows":
            products = leave_in_parts(products, self.compute.parallelism, at_once=at_once)
        bias = self._own("bias")
        if bias is None:
            return products
        # Wide, so that the bias's gradient, a sum over all tokens, is wide too.
        wide = jnp.promote_types(products[0].dtype, jnp.float32)
        return tuple(
            (each.astype(wide) + bias.astype(wide)).astype(each.dtype) for each in products
        )

    def with_kernel(self, kernel: jax.Array) -> "Linear":
        """Return the layer with another value of its kernel."""
        graph, own = nnx.split(self)
        made: Linear = nnx.merge(graph, nnx.to_pure_dict(own) | {"kernel": kernel})
        return made

    def products(
        self, parts: Sequence[jax.Array], context: LayerContext | None = None
    ) -> list[jax.Array]:
        """Multiply each part [..., inputs] by this rank's part of the kernel: [..., outputs].

        What the layer's scaled adapter adds, if it has one, is added.
        """
        # One contracting dim: XLA for CPUs transposes its operands to contract over two, which made
        # the kernel's gradient, a contraction over rows and sequence, up to twice as slow.
        turned = list(map(self._turned, parts))
        tokens = [x.reshape(-1, x.shape[-1]) for x in turned]
        axes = operand_axes(self.compute.parallelism, self.sharding)
        matmul = self.compute.matmul_at(context)
        kernel, amax = self._own("kernel"), self._own("amax")
        if self.is_trained or matmul.recipe is not None:
            products = matmul.multiply_each(tokens, kernel, amax, axes)
        else:  # nothing is kept for a gradient of all parts
            products = tuple(matmul.multiply(own, kernel) for own in tokens)
        if hasattr(self, "lora_a"):
            products = tuple(
                saveable(product + (own @ self._own("lora_a")) @ self._own("lora_b"))
                for product, own in zip(products, tokens, strict=True)
            )
        return [
            self._turned(product.reshape(*x.shape[:-1], -1))
            for product, x in zip(products, turned, strict=True)
        ]

    def _turned(self, x: jax.Array) -> jax.Array:
        """Return [B, S, numbers] as [S, B, numbers], or the other way round, for `products`."""
        return x.swapaxes(0, 1) if self.compute.positions_first and x.ndim == 3 else x

    def _own(self, name: str) -> Any:
        """Return a parameter's value, None where there is none.

        Of heads that several ranks of `tensor` hold it is the one that this rank's queries read.
        """
        if not hasattr(self, name):
            return None
        value = getattr(self, name).get_value()
        tensor = self.compute.parallelism.tensor
        if self.heads is None or self.heads >= tensor or name in ("lora_a", "amax"):
            return value
        width = self.kernel.get_value().shape[-1] // self.heads
        first = lax.axis_index("tensor") // (tensor // self.heads) * width

        def of_head(leaf: jax.Array) -> jax.Array:
            if leaf.ndim == 0:  # the scale of a quantized kernel, the same for all heads
                return leaf
            return lax.dynamic_slice_in_dim(leaf, first, width, axis=-1)

        return jax.tree.map(of_head, value)


def enter(
    parts: Sequence[jax.Array], layers: Sequence[Linear], *, at_once: bool = False
) -> tuple[Sequence[jax.Array], Sequence[Linear]]:
    """Copy parts [B, S, H] of the stream to all ranks of `tensor`, for all `layers` that read it.

    In the backward of the layers that are returned, the gradients of their kernels are computed
    while that of the stream travels. `at_once` is that of `enter_in_parts`.
    """
    parallelism = layers[0].compute.parallelism
    if parallelism.tensor > 1 and layers[0].is_trained:
        quantized, trained = split_quantized([each.kernel.get_value() for each in layers])
        parts, trained = together_backwards((tuple(parts), trained))
        layers = list(map(Linear.with_kernel, layers, merge_quantized(quantized, trained)))
    return enter_in_parts(parts, parallelism, at_once=at_once), layers


def apply_entered(
    parts: Sequence[jax.Array],
    layers: Sequence[Linear],
    context: LayerContext | None,
    *,
    at_once: bool = False,
) -> list[tuple[jax.Array, ...]]:
    """Apply `layers` to parts [B, S, H] of the stream, which enter all ranks of `tensor` for them.

    Returns:
        For each layer its results of all parts; `at_once` is that of `enter_in_parts`.
    """
    compute = layers[0].compute
    plain = compute.matmul.recipe is None and not any(hasattr(each, "lora_a") for each in layers)
    if len(parts) > 1 and compute.gathers_again and plain and layers[0].is_trained:
        kernels = [each._own("kernel") for each in layers]
        made = entered_products(parts, kernels, at_once=at_once)
        return [each._finished(own) for each, own in zip(layers, made, strict=True)]
    entered, layers = enter(parts, layers, at_once=at_once)
    return [each.of_parts(entered, context) for each in layers]


def operand_axes(parallelism: Parallelism, sharding: KernelSharding | None) -> Axes:
    """Return the axes over which the operands of a linear layer's matmul are sharded."""
    tensor = ("tensor",) if parallelism.tensor > 1 else ()
    context = ("context",) if parallelism.context > 1 else ()
    if sharding == "rows":
        return Axes(x=(*context, *tensor), w=tensor, dy=context)
    return Axes(x=context, w=tensor, dy=(*context, *tensor))


class FeedForward(nnx.Module):
    """A feed-forward block: up, perhaps a gate, and down.

    Args:
        width: numbers between them.
        config: the model.
        compute: how it computes.
        bias: True if its layers have biases.
        experts: number of experts, each a block of its own; 0: no experts.
    """

    def __init__(
        self,
        width: int,
        config: ModelConfig,
        compute: ComputeSettings = ON_ONE_DEVICE,
        *,
        bias: bool = False,
        experts: int = 0,
    ):
        self.config, self.compute, hidden = config, compute, config.hidden_size
        layer = functools.partial(
            Linear, config=config, compute=compute, bias=bias, experts=experts
        )
        self.up = layer(hidden, width, sharding="columns", target="up_proj")
        if config.gated:
            self.gate = layer(hidden, width, sharding="columns", target="gate_proj")
        self.down = layer(width, hidden, sharding="rows", target="down_proj")

    def __call__(self, x: jax.Array, context: LayerContext | None = None) -> jax.Array:
        """Compute the contribution to the residual stream [B, S, H] of the normed one `x`."""
        return join_stream(self.of_parts(split_stream(x, self.compute.parallelism), context))

    def of_parts(
        self, parts: Sequence[jax.Array], context: LayerContext | None = None
    ) -> tuple[jax.Array, ...]:
        """Compute the contribution of each part of the normed stream."""
        middle = self._activated(apply_entered(parts, self.first, context))
        # Behind it a layer ends, and where its backward begins all cotangents are there.
        return self.down.of_parts(middle, context, at_once=True)

    @property
    def first(self) -> Sequence[Linear]:
        """The layers that read the stream."""
        return (self.gate, self.up) if self.config.gated else (self.up,)

    def middle(self, parts: Sequence[jax.Array], context: LayerContext | None) -> list[jax.Array]:
        """Compute the input [..., F] of the down projection from each part [..., H]."""
        return self._activated([each.of_parts(parts, context) for each in self.first])

    def _activated(self, made: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """Apply the activation to what `first` made of each part."""
        return [
            activate(up, gate[0] if gate else None, self.config)
            for *gate, up in zip(*made, strict=True)
        ]


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


class Norm(nnx.Module):
    """A norm of the last dim, computed in at least float32.

    LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), whose stored scale may be the
    scale minus 1 (Nemotron-4, Gemma); by `config.norm`.

    Args:
        size: the dim's.
        config: the model.
        eps: number added before the root is taken; None: `config.rms_norm_eps`.
        of_heads: True if ranks of `tensor` apply it to their own heads alone.
        has_bias: True if numbers are shifted after it; None: as the model's norms of the stream.
    """

    def __init__(
        self,
        size: int,
        config: ModelConfig,
        *,
        eps: float | None = None,
        of_heads: bool = False,
        has_bias: bool | None = None,
    ):
        self.eps = config.rms_norm_eps if eps is None else eps
        self.is_centered = config.norm.startswith("layernorm")
        self.is_stored_minus_1 = config.norm.endswith("1p")
        scale = constant(0.0 if self.is_stored_minus_1 else 1.0)
        self.scale = parameter((size,), scale, in_parts=of_heads)
        if self.is_centered if has_bias is None else has_bias:
            self.bias = parameter((size,), constant(0.0), in_parts=of_heads)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize `x` [..., H], or heads [..., D], over its last dim, in `x.dtype`."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scale = self.scale.get_value().astype(wide.dtype)
        if self.is_centered:
            wide = wide - wide.mean(-1, keepdims=True)
        if self.is_stored_minus_1:
            scale = 1 + scale
        inverse = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        result = wide * inverse * scale
        if hasattr(self, "bias"):
            result = result + self.bias.get_value().astype(wide.dtype)
        return result.astype(x.dtype)


# Odd constants that spread consecutive indices over 32 bits: the golden ratio, and two primes.
_ROW, _COLUMN, _ELEMENT = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D


def dropout(
    x: jax.Array,
    key: jax.Array | None,
    sequence_indices: jax.Array | None,
    positions: jax.Array,
    rate: float,
) -> jax.Array:
    """Zero a share `rate` of `x` [B, S, H] and scale up the rest.

    A mask depends on the element and not on the device that computes it: an element of the stream
    is dropped by a hash of the key, the sequence's index in the global batch, the position in the
    sequence, and its dim. Every layout therefore draws the same masks, and nothing is stored for
    the backward pass that could not be computed again.

    Args:
        x: the activations.
        key: a JAX key that holds seed, step, layer and which dropout this is; None drops nothing.
        sequence_indices: int32 [B], the sequences' indices in the global batch; None without key.
        positions: int32 [S], positions in the sequence.
        rate: the probability that an element is dropped, in [0, 1).
    """
    if key is None or rate == 0:
        return x
    assert sequence_indices is not None, "a sequence's mask has its index"
    keep = 1 - rate
    kept = _hash(key, sequence_indices, positions, x.shape[2]) < jnp.uint32(
        min(round(keep * 2**32), 2**32 - 1)
    )
    return jnp.where(kept, x * jnp.asarray(1 / keep, x.dtype), jnp.zeros((), x.dtype))


def _hash(
    key: jax.Array, sequence_indices: jax.Array, positions: jax.Array, hidden: int
) -> jax.Array:
    """Return random bits, uint32 [B, S, H]."""
    first, second = jax.random.key_data(key)
    of_sequence = _mix(first + sequence_indices.astype(jnp.uint32) * jnp.uint32(_ROW))[
        :, None, None
    ]
    of_column = _mix(second + positions.astype(jnp.uint32) * jnp.uint32(_COLUMN))[None, :, None]
    element = jnp.arange(hidden, dtype=jnp.uint32) * jnp.uint32(_ELEMENT)
    return _mix(_mix(of_sequence + element[None, None, :]) ^ of_column)


def _mix(x: jax.Array) -> jax.Array:
    """Mix 32 bits bijectively: every input bit flips each output bit half of the time.

    The finalizer of MurmurHash3 (Appleby 2011).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
