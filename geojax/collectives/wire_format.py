"""Wire formats: in what numbers travel between sites, in fewer bytes than they have.

A format turns numbers into a message, which travels as it is on every platform (of integers, where
XLA for CPUs would widen what they stand for), and back. Bytes of n numbers:

    FLOAT32    4 n
    BFLOAT16   2 n
    INT8         n + 4 ceil(n / 256)     one float32 scale for each block of 256

INT8 is linear: a block's largest magnitude is 127 (blockwise, as in Dettmers et al. 2021, "8-bit
Optimizers via Block-wise Quantization", whose codes are not linear). An infinity or a NaN makes its
whole block NaN.

Rounding to 8 bits would bias training, so the sums of `geojax.collectives.exchange` can keep what
it took away and add it the next time (error feedback: Seide et al. 2014, "1-Bit Stochastic Gradient
Descent"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

WireName: TypeAlias = Literal["fp32", "bf16", "int8"]
"""What wire formats are called; "fp32" is none: numbers travel as they are."""


class Wire(Protocol):
    """A format of messages."""

    @property
    def feedback(self) -> bool:
        """Whether sums should carry its rounding errors to the next time."""

    def message_bytes(self, count: int) -> int:
        """The bytes of a message of `count` numbers."""

    def encode(self, x: jax.Array) -> jax.Array:
        """The messages [..., length] of floating-point numbers [..., count], in integers."""

    def decode(self, messages: jax.Array, count: int, dtype: Any) -> jax.Array:
        """The numbers [..., count] of messages [..., length], in `dtype`."""


@dataclass(frozen=True)
class Float32Wire:
    """Numbers as they are, rounded to float32 if they are wider.

    For Gloo, whose all-reduce waits for each megabyte to be answered, with two of them on the way:
    over 100 ms it was seen to take 2.3 s for 32 MB, and these messages 0.7 s.
    """

    @property
    def feedback(self) -> bool:
        """Nothing is lost."""
        return False

    def message_bytes(self, count: int) -> int:
        """Four a number."""
        return 4 * count

    def encode(self, x: jax.Array) -> jax.Array:
        """float32 [..., count]."""
        return x.astype(jnp.float32)

    def decode(self, messages: jax.Array, count: int, dtype: Any) -> jax.Array:
        """The same numbers."""
        assert messages.shape[-1] == count, f"a message of {messages.shape[-1]} for {count} numbers"
        return messages.astype(dtype)


@dataclass(frozen=True)
class Bfloat16Wire:
    """Numbers rounded to bfloat16."""

    @property
    def feedback(self) -> bool:
        """Eight bits of precision need none."""
        return False

    def message_bytes(self, count: int) -> int:
        """Two a number."""
        return 2 * count

    def encode(self, x: jax.Array) -> jax.Array:
        """uint16 [..., count]: the bits."""
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, messages: jax.Array, count: int, dtype: Any) -> jax.Array:
        """The numbers that the bits are."""
        assert messages.shape[-1] == count, f"a message of {messages.shape[-1]} for {count} numbers"
        return lax.bitcast_convert_type(messages, jnp.bfloat16).astype(dtype)


@dataclass(frozen=True)
class Int8Wire:
    """Integers of 8 bits and, behind them in the same message, a float32 scale for each block."""

    block: int = 256
    """Numbers that share a scale."""

    @property
    def feedback(self) -> bool:
        """Without it what is below half a step of its block would never be heard of."""
        return True

    def message_bytes(self, count: int) -> int:
        """One a number and four a block."""
        return count + 4 * self._blocks(count)

    def encode(self, x: jax.Array) -> jax.Array:
        """int8 [..., count + 4 * blocks]."""
        count = x.shape[-1]
        blocks = self._in_blocks(x)
        largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
        scale = (largest / 127).astype(jnp.float32)
        # A subnormal scale may be flushed to zero by one device and not by another.
        scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, jnp.zeros_like(scale), scale)
        usable = (scale > 0) & jnp.isfinite(scale)
        steps = jnp.round(blocks / jnp.where(usable, scale, jnp.ones_like(scale)))
        codes = jnp.where(usable, steps, jnp.zeros_like(steps)).astype(jnp.int8)
        codes = codes.reshape(*x.shape[:-1], -1)[..., :count]
        scales = lax.bitcast_convert_type(scale[..., 0], jnp.int8)
        return jnp.concatenate([codes, scales.reshape(*x.shape[:-1], -1)], axis=-1)

    def decode(self, messages: jax.Array, count: int, dtype: Any) -> jax.Array:
        """Each integer times the scale of its block."""
        assert messages.shape[-1] == self.message_bytes(count), "the message is of other numbers"
        codes = self._in_blocks(messages[..., :count])
        scales = messages[..., count:].reshape(*codes.shape[:-1], 4)
        scale = lax.bitcast_convert_type(scales, jnp.float32)
        numbers = codes.astype(dtype) * scale.astype(dtype)[..., None]
        return numbers.reshape(*messages.shape[:-1], -1)[..., :count]

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _in_blocks(self, x: jax.Array) -> jax.Array:
        """[..., count] as [..., blocks, block], padded with zeros."""
        count = x.shape[-1]
        missing = self._blocks(count) * self.block - count
        if missing:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
        return x.reshape(*x.shape[:-1], -1, self.block)


FLOAT32 = Float32Wire()
"""As many bytes as an all-reduce of float32."""

BFLOAT16 = Bfloat16Wire()
"""Half the bytes of float32."""

INT8 = Int8Wire()
"""A little more than a quarter of the bytes of float32."""


def wire_format(name: WireName) -> Wire | None:
    """The format called `name`; None for "fp32"."""
    formats: dict[WireName, Wire | None] = {"fp32": None, "bf16": BFLOAT16, "int8": INT8}
    return formats[name]
