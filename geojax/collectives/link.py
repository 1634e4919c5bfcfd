"""The sum over sites in a wire format: what a rank's share of a tensor does on the long link.

Of o sites each owns 1/o of the numbers x, which all of them hold:

    encode the parts of x ─► all-to-all ─► the owner decodes what came for it and sums it
                                                 │ encodes the sum
    everyone decodes      ◄─ all-gather ◄────────┘

(the quantised reduce-scatter of ZeRO++, Wang et al. 2023, and the same for the way back). All sites
decode the same bytes, and so end with the same bits. With P bytes of x in the format a device sends
2 (o - 1) / o P, as in an all-reduce: P with 2 sites, 4/3 P with 3, 3/2 P with 4. All of x to all of
them would be (o - 1) P: the same with 2 sites, in one message and not two, and more with others.

Errors. A site's error is what rounding took away from what it has sent, the owner's from the sum
too; it is added to what the site sends next. Over any number of times, with sums s and errors e,

    sum over times of s = sum over times and sites of x - sum over sites of the last e
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import axis_sizes, to_varying, varying_axes
from geojax.collectives.wire import Wire


class LinkSum(NamedTuple):
    """What `sum_in_format` returns."""

    total: jax.Array
    """The sum; the same bits on all ranks of `outer`, not varying over it."""
    error: jax.Array
    """This site's, like its argument."""


def sum_in_format(
    x: jax.Array, outer: tuple[str, ...], inner: tuple[str, ...], wire: Wire
) -> LinkSum:
    """The sum of `x` over `outer`; its derivative is that of the plain sum.

    Args:
        x: floating-point numbers [count], with the error of the time before added.
        outer: the axes between sites, each longer than 1.
        inner: axes inside a site over which the result is gathered, in the format: each of its
            ranks has another `x` then. None, the usual: the sum stays where it is.
        wire: the format.

    Returns:
        The sum [ranks of inner * count], not varying over `inner`; and the error [count].
    """
    return LinkSum(*_sum_in_format(to_varying(x, (*outer, *inner)), outer, inner, wire))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _sum_in_format(
    x: jax.Array, outer: tuple[str, ...], inner: tuple[str, ...], wire: Wire
) -> tuple[jax.Array, jax.Array]:
    sites = math.prod(axis_sizes(outer).values())
    count = -(-x.size // sites)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    parts = jnp.pad(x.astype(dtype), (0, sites * count - x.size)).reshape(sites, count)
    sent = wire.encode(parts)
    received = lax.all_to_all(sent, outer, 0, 0)
    total = jnp.sum(wire.decode(received, count, dtype), axis=0)
    answer = wire.encode(total)
    messages = lax.all_gather(answer, outer, to="invarying")  # [sites, length]

    error = parts - wire.decode(sent, count, dtype)
    error = error.at[lax.axis_index(outer)].add(total - wire.decode(answer, count, dtype))
    error = error.reshape(-1)[: x.size].astype(x.dtype)

    if inner:
        messages = lax.all_gather(messages, inner, to="invarying")  # [ranks, sites, length]
    numbers = wire.decode(messages, count, dtype)
    whole = numbers.reshape(*numbers.shape[:-2], sites * count)[..., : x.size].reshape(-1)
    return whole.astype(x.dtype), error


@_sum_in_format.defjvp
def _derivative(
    outer: tuple[str, ...],
    inner: tuple[str, ...],
    wire: Wire,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    whole, error = _sum_in_format(*primals, outer, inner, wire)
    tangent = lax.psum(tangents[0], outer)
    if inner:
        tangent = lax.all_gather(tangent, inner, tiled=True, to="invarying")
    return (whole, error), (tangent, to_varying(jnp.zeros_like(error), varying_axes(error)))
