"""Numbers to messages in a wire format and back, with what rounding took away; it knows no mesh.

With two sites each encodes its numbers as one message, and both decode and sum the two. With more,
every site owns a part of the numbers: it decodes and sums what the others sent for its part, and
encodes the sum once more (`geojax.collectives.exchange` moves the messages).

Error feedback: a site's error is what rounding took away from what it has sent, the owner's from
the sum too; it is added to what the site sends next. Over any number of steps, with sums s and
errors e,

    sum over steps of s = sum over steps and sites of x - sum over sites of the last e
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.collectives.buckets import whole_blocks
from geojax.collectives.wire_format import WireFormat


class EncodedNumbers(NamedTuple):
    """Messages, and what rounding took away from them."""

    messages: jax.Array
    """[length], or [parts, length] of numbers in several parts."""
    error: jax.Array
    """Numbers minus what the messages decode to; shape and dtype of the numbers."""


def encode(numbers: jax.Array, wire: WireFormat, parts: int = 1) -> EncodedNumbers:
    """Encode numbers [count] as one message [length], or in parts as [parts, length]."""
    wide = numbers.astype(sum_dtype(numbers.dtype))
    divided = wide if parts == 1 else split(wide, parts, wire)
    messages = wire.encode(divided)
    lost = divided - wire.decode(messages, divided.shape[-1], divided.dtype)
    return EncodedNumbers(messages, lost.reshape(-1)[: numbers.size].astype(numbers.dtype))


def decode_sum(
    messages: jax.Array | Iterable[jax.Array], count: int, wire: WireFormat, dtype: Any
) -> jax.Array:
    """Decode messages of `count` numbers each and sum them, [count] in `sum_dtype`.

    One after the other: XLA for CPUs takes 70 times as long for a sum over a dimension of two.
    """
    wide = sum_dtype(dtype)
    return functools.reduce(jnp.add, (wire.decode(each, count, wide) for each in messages))


def decode_parts(messages: jax.Array, count: int, wire: WireFormat, dtype: Any) -> jax.Array:
    """Decode messages [parts, length] of `count` numbers in all, [count] in `sum_dtype`."""
    part = part_length(count, len(messages), wire)
    return wire.decode(messages, part, sum_dtype(dtype)).reshape(-1)[:count]


def split(numbers: jax.Array, parts: int, wire: WireFormat) -> jax.Array:
    """Reshape [count] to [parts, part_length], padded with zeros."""
    part = part_length(numbers.size, parts, wire)
    return jnp.pad(numbers, (0, parts * part - numbers.size)).reshape(parts, part)


def part_length(count: int, parts: int, wire: WireFormat) -> int:
    """Return the numbers of each of `parts` parts of `count` numbers, in whole blocks."""
    return whole_blocks(count, parts * wire.block) // parts


def sum_dtype(dtype: Any) -> Any:
    """Return the dtype in which numbers of `dtype` are summed: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)
