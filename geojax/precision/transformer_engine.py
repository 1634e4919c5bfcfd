"""FP8 matmuls by TransformerEngine: its quantization kernel and its call of cuBLASLt.

    x, 1 / scale ─► te_dbias_quantize ─► FP8 [rows, columns] ─┬─► te_gemm ─► result
                                         FP8 [columns, rows]  │
    w, 1 / scale ─► te_dbias_quantize ─► ... ─────────────────┘

Only these two are its own. Where a scale comes from is the same for every backend: the quantizer
that takes a scale as given serves every recipe with one scale per tensor. (What TransformerEngine
calls a scale is the inverse of ours.) cuBLASLt on Hopper reads both operands along the dim that is
contracted; one that lies across it is quantized as it lies and then transposed, one byte a number.

The package is imported when it is asked for, which needs NVIDIA's libraries and driver.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.collectives.axes import to_varying, varying_axes
from geojax.errors import UserError
from geojax.precision.quantize import Quantized, scales_for
from geojax.precision.recipes import Format

_MULTIPLE = 16
"""Divisor of the sizes of matrices: cuBLASLt reads FP8 numbers in rows of whole 16 bytes."""


class _Engine(NamedTuple):
    operations: ModuleType
    quantizers: ModuleType


def _engine() -> _Engine:
    """Import the parts of the package.

    Raises:
        ImportError, OSError, RuntimeError: the package, a library of NVIDIA's or the driver is
            missing.
    """
    jax.devices()  # JAX has then loaded those of NVIDIA's libraries that the package needs.
    from transformer_engine.jax import cpp_extensions, quantize

    return _Engine(cpp_extensions, quantize)


def unsupported_reason() -> str | None:
    """Say why TransformerEngine cannot run FP8 matmuls on this process's GPUs; None: it can.

    The reason is one line, as it follows "since".
    """
    try:
        quantizers = _engine().quantizers
    except (ImportError, OSError, RuntimeError) as error:
        return f"TransformerEngine cannot be imported ({_first_line(error)})"
    try:
        mode = quantizers.ScalingMode.DELAYED_TENSOR_SCALING
        supported, reason = quantizers.is_scaling_mode_supported(mode)
    except RuntimeError as error:
        return f"TransformerEngine finds no GPU ({_first_line(error)})"
    return None if supported else f"TransformerEngine refuses the GPU ({reason})"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def quantize(x: jax.Array, form: Format, amax: jax.Array | None) -> Callable[[int], Any]:
    """Quantize the matrix `x`; returns a function from the contracted dim to the FP8 matrix.

    It is quantized once for both dims; of the two forms, one that no matmul takes is not computed.

    Args:
        x: [rows, columns], of at most 32 bits.
        form: the format, with one scale for the tensor.
        amax: float32 [], the largest magnitude that it should hold.

    Raises:
        UserError: a size is not a multiple of 16.
    """
    assert form.along is None, "the format has one scale for the tensor"
    assert amax is not None, "the amax of the tensor is given"
    _check_sizes(x.shape)
    operations, quantizers = _engine()
    quantizer = quantizers.QuantizerFactory.create(
        scaling_mode=quantizers.ScalingMode.DELAYED_TENSOR_SCALING,
        q_dtype=getattr(jnp, form.dtype.name),  # It compares dtypes with JAX's own names of them.
        q_layout=quantizers.QuantizeLayout.ROWWISE_COLWISE,
        scale=1 / scales_for(amax, form).astype(jnp.float32).reshape(1),
        amax_history=jnp.zeros(1, jnp.float32),  # Nobody reads what becomes of this one.
    )
    made = _as_varying(operations.quantize(x, quantizer=quantizer), x)
    return _by_dim(made, quantizers)


def from_quantized(weight: Quantized, dtype: jnp.dtype) -> Callable[[int], Any]:
    """Wrap a matrix that is quantized already as `quantize` returns it.

    Args:
        weight: the matrix, with one scale for the tensor.
        dtype: its dtype before it was quantized.
    """
    _check_sizes(weight.values.shape)
    quantizers = _engine().quantizers
    scales = weight.scales.astype(jnp.float32).reshape(1)
    made = quantizers.ScaledTensorFactory.create_2x(
        weight.values,
        scales,
        weight.values.T,
        scales,
        scaling_mode=quantizers.ScalingMode.DELAYED_TENSOR_SCALING,
        dq_dtype=dtype,
        data_layout="NT",
    )
    return _by_dim(made, quantizers)


def _by_dim(made: Any, quantizers: ModuleType) -> Callable[[int], Any]:
    usage = quantizers.TensorUsage
    return lambda contracting: made.get_tensor(usage.LHS if contracting == 1 else usage.LHS_TRANS)


def _check_sizes(shape: tuple[int, ...]) -> None:
    if any(size % _MULTIPLE for size in shape):
        raise UserError(
            "fp8.backend=transformer_engine requires matrices whose sizes are multiples of "
            f"{_MULTIPLE}; got {list(shape)}. Choose such a hidden_size, tensor rank's part of "
            "intermediate_size and heads, and tokens of a microbatch on a rank, or set "
            "fp8.backend=reference, or precision=bf16"
        )


def multiply(left: Any, right: Any, contracting: tuple[int, int]) -> jax.Array:
    """Multiply two FP8 matrices, in the dtype that `left` was quantized from. Not differentiable.

    cuBLASLt adds up with its fast accumulation, as it does for XLA, unless the package's variable
    NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION is 1.

    Args:
        left: a result of `quantize`, for the first dim of `contracting`.
        right: likewise, for the second.
        contracting: the dims of the matrices as they were given to `quantize`.
    """
    dims = (contracting[:1], contracting[1:])
    product = _engine().operations.gemm(left, right, contracting_dims=dims)
    return _as_varying(product, left.data, right.data)


def _as_varying(made: Any, *sources: jax.Array) -> Any:
    """Type the arrays in `made` as varying over all axes that `sources` vary over.

    The package's primitives do not declare the axes that their results vary over.
    """
    varying = sorted(frozenset[str]().union(*map(varying_axes, sources)))
    return jax.tree.map(lambda leaf: to_varying(leaf, varying), made)
