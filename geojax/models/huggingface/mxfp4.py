"""Matrices in MXFP4: blocks of 32 numbers of 4 bits, each block with a power of two.

A number has a sign, two bits of exponent and one of mantissa (E2M1); a block's factor is
2^(scale - 127), and NaN for a scale of 255 (E8M0). Source: Open Compute Project, "OCP Microscaling
Formats (MX) Specification", version 1.0, sections 5.3 and 6.3.

gpt-oss is published with the matrices of its experts, NAME [E, inputs, outputs], in blocks along
the inputs:

    NAME_blocks    uint8 [E, outputs, inputs / 32, 16]    the low four bits are the first number
    NAME_scales    uint8 [E, outputs, inputs / 32]
"""

import numpy as np

from geojax.models.huggingface.tensor_map import InTensor, Tensor
from geojax.models.huggingface.weight_files import Header, WeightFiles

_BLOCK = 32
_NUMBERS = np.array(
    [sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)],
    np.float32,
)


def is_in_blocks(tensor: Tensor) -> bool:
    """Return True for a tensor that a checkpoint in MXFP4 holds in blocks: experts' matrices."""
    return tensor.rule.stacks_experts and len(tensor.shape) == 3


def headers_of(tensor: Tensor) -> dict[str, Header]:
    """Return the headers of the two tensors that hold `tensor`, by name."""
    experts, inputs, outputs = tensor.shape
    shape = (experts, outputs, -(-inputs // _BLOCK))
    return {
        f"{tensor.name}_blocks": Header((*shape, _BLOCK // 2), ("U8",)),
        f"{tensor.name}_scales": Header(shape, ("U8",)),
    }


def read_blocks(files: WeightFiles, name: str, part: InTensor) -> np.ndarray:
    """Read a part of one expert's matrix, [inputs, outputs] in float32, and of others no byte.

    Raises:
        UserError: a file is missing or damaged, or a number is no weight.
    """
    expert, inputs, outputs = part
    assert isinstance(inputs, slice), "an expert's matrix has two dims"
    first = inputs.start // _BLOCK
    blocks = slice(first, -(-inputs.stop // _BLOCK))
    pairs = files.read(f"{name}_blocks", (expert, outputs, blocks, slice(0, _BLOCK // 2)))
    scales = files.read(f"{name}_scales", (expert, outputs, blocks))
    start = inputs.start - first * _BLOCK
    numbers = decode(pairs, scales)
    files.refuse_no_weights(f"{name}_scales", numbers)
    return numbers[:, start : start + inputs.stop - inputs.start].T


def decode(pairs: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode uint8 [..., blocks, 16] with scales [..., blocks] to float32 [..., 32 blocks]."""
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*scales.shape, _BLOCK)
    factors = np.ldexp(np.float32(1), np.minimum(scales, 254).astype(np.int32) - 127)
    factors[scales == 255] = np.nan
    numbers: np.ndarray = _NUMBERS[codes] * factors[..., None]
    return numbers.reshape(*scales.shape[:-1], -1)
