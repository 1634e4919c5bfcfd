"""FP8 recipes as data: the format and the scale of each operand of a matmul."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

E4M3 = np.dtype(jnp.float8_e4m3fn)
"""4 bits of exponent, 3 of mantissa: up to 448, relative error at most 1/16."""
E5M2 = np.dtype(jnp.float8_e5m2)
"""5 bits of exponent, 2 of mantissa: up to 57,344, relative error at most 1/8."""
E8M0 = np.dtype(jnp.float8_e8m0fnu)
"""8 bits of exponent: a power of two."""

_BFLOAT16 = np.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Format:
    """FP8 format of a matrix: numbers of `dtype` times the scale of their block.

    A block is `along` numbers in the direction that a matmul contracts, by `across` in the other.
    """

    dtype: np.dtype[Any]
    """Dtype of the numbers."""
    along: int | None = None
    """Numbers of a block in the contracted direction; None: the whole tensor is one block."""
    across: int = 1
    """Numbers of a block in the other direction, where the tensor is not one block."""
    scale_dtype: np.dtype[Any] = _BFLOAT16
    """Dtype of scales. A scale per tensor is rounded to bfloat16, so that a matmul can hold it in
    any compute dtype."""
    power_of_two: bool = False
    """Round scales up to a power of two."""

    @property
    def serves_both_dims(self) -> bool:
        """True if a matrix has the same blocks, whichever of its dims a matmul contracts."""
        return self.along is None or self.along == self.across


@dataclasses.dataclass(frozen=True)
class Recipe:
    """FP8 formats of the matmuls of linear layers, forward and backward.

    Both gradients of y = x w are such matmuls as well: dx = dy w^T and dw = x^T dy.
    """

    name: str
    """Name in a config, after "fp8-"."""
    activation: Format
    """Format of x."""
    weight: Format
    """Format of w."""
    gradient: Format
    """Format of dy."""
    history: int = 0
    """Number of steps before whose largest magnitudes set the scales; 0: the tensor itself does."""
    num_bf16_layers_per_end: int = 0
    """Layers at either end of the model whose matmuls are in the compute dtype."""

    @property
    def per_tensor(self) -> bool:
        """True if a tensor has one scale."""
        return self.activation.along is None


_BLOCK = Format(E4M3, along=128, scale_dtype=np.dtype(jnp.float32), power_of_two=True)
_MICROSCALING = Format(E4M3, along=32, scale_dtype=E8M0, power_of_two=True)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        # Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; the history is that of
        # TransformerEngine's DelayedScaling, which takes the largest of it.
        Recipe("delayed", Format(E4M3), Format(E4M3), Format(E5M2), history=1024),
        # TransformerEngine's Float8CurrentScaling, with the first and the last layer in bf16.
        Recipe("current", Format(E4M3), Format(E4M3), Format(E5M2), num_bf16_layers_per_end=1),
        # DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2; scales are powers of two,
        # as TransformerEngine's Float8BlockScaling has them.
        Recipe("block", _BLOCK, dataclasses.replace(_BLOCK, across=128), _BLOCK),
        # "OCP Microscaling Formats (MX) Specification" 1.0; scales are rounded up, not down, as in
        # Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8", so that nothing saturates.
        Recipe("mxfp8", _MICROSCALING, _MICROSCALING, _MICROSCALING),
    )
}
