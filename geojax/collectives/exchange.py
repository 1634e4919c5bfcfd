"""The sum of an array over sites: start, exchange, done.

Numbers cross as they are, in a `psum`, or in messages of a wire format
(`geojax.collectives.codec`). Two sites swap one message each, and both decode and add them:

    encode x ─► permute, or all-gather ─► decode both and add

With o > 2 sites it is a quantized reduce-scatter followed by a quantized all-gather (as in ZeRO++,
Wang et al. 2023); each site owns 1/o of the numbers:

    encode the parts of x ─► all-to-all ─► the owner decodes and sums what came, encodes the sum
    decode                ◄─ all-gather ◄─┘

All sites decode the same bytes, so replicas stay bit-identical. With P bytes of x in the format a
device sends 2 (o - 1) / o P, as in an all-reduce: P with 2 sites, 4/3 P with 3, 3/2 P with 4.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from geojax.collectives import codec
from geojax.collectives.axes import agreed, axis_sizes, to_varying, varying_axes
from geojax.collectives.wire_format import WireFormat
from geojax.runtime.platform import GPU, site_exchange, target_platform

_LINK_STREAM = "1"
"""The communication stream of sums over sites that travel beside other collectives."""


class Sum(NamedTuple):
    """A sum over sites, and what rounding took away from this site's part of it."""

    total: jax.Array
    error: jax.Array | None
    """None: no errors are kept."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["contents", "error"],
    meta_fields=["shape", "dtype", "inter", "wire", "keep_error"],
)
@dataclass(frozen=True)
class SiteSum:
    """The sum of one array over sites, under way; a pytree.

    It has no derivative where there is a wire format: `sum_over_sites` has.
    """

    contents: tuple[jax.Array, ...]
    """The array; or messages. Those of two sites are the own [length] and, once exchanged, the
    other's, or both gathered [2, length]. Those of more are [sites, length] for the owners and,
    once exchanged, their answers."""
    error: jax.Array | None
    """Rounding errors of the own messages, [count]; None: none are kept, or there is no format."""
    shape: tuple[int, ...]
    dtype: jnp.dtype
    inter: tuple[str, ...]
    """The axes between sites, each longer than 1; none: nothing has to cross."""
    wire: WireFormat | None
    keep_error: bool

    @classmethod
    def start(
        cls, x: jax.Array, inter: tuple[str, ...], wire: WireFormat | None, *, keep_error: bool
    ) -> "SiteSum":
        """Encode `x`, to which the error of the step before has been added.

        Args:
            x: this rank's part of the sum, of any shape.
            inter: the axes between sites, each longer than 1.
            wire: the format of floating-point numbers; None, as they are.
            keep_error: whether `done` is to return what rounding took away.
        """
        crosses = inter if x.size else ()  # XLA has no collectives of empty arrays
        if not crosses or not jnp.issubdtype(x.dtype, jnp.floating):
            wire = None
        contents, error = (x,), None
        if wire is not None:
            sites = _sites(inter)
            parts = 1 if sites == 2 else sites
            encoded = codec.encode(to_varying(x.reshape(x.size), inter), wire, parts)
            contents, error = (encoded.messages,), encoded.error if keep_error else None
        return cls(contents, error, x.shape, x.dtype, crosses, wire, keep_error)

    def exchange(self, *, own_stream: bool = False) -> "SiteSum":
        """Send to the other sites, and receive: the only phase in which anything crosses.

        With `own_stream`, on GPUs on a stream that no other collective uses. All otherwise share
        communication stream 0: what crosses a long link would hold up those inside the site.
        """
        (content,) = self.contents
        if not self.inter:
            return self
        sites = _sites(self.inter)
        on_stream = _on_link_stream if own_stream and target_platform() is GPU else lambda x: x
        match site_exchange(target_platform(), sites, messages=self.wire is not None):
            case "psum":
                contents: tuple[jax.Array, ...] = (on_stream(lax.psum(content, self.inter)),)
            case "permute":
                other = lax.ppermute(content, self.inter, [(0, 1), (1, 0)])
                contents = content, on_stream(other)
            case "all_gather":
                gathered = lax.all_gather(content, self.inter, to="invarying")
                contents = (on_stream(gathered),)
            case "all_to_all":
                assert self.wire is not None, "parts are messages"
                return self._exchange_parts(content, self.wire)
        return dataclasses.replace(self, contents=contents)

    def done(self) -> Sum:
        """Decode: the same bits on all sites, not varying over `inter`."""
        if self.wire is None:
            (total,) = self.contents
            return Sum(total, jnp.zeros_like(total) if self.keep_error else None)
        count = math.prod(self.shape)
        if _sites(self.inter) == 2:  # the sum of two does not depend on which comes first
            messages = self.contents if len(self.contents) == 2 else self.contents[0]
            total = codec.decode_sum(messages, count, self.wire, self.dtype)
            total = agreed(total, self.inter)
        else:
            total = codec.decode_parts(self.contents[0], count, self.wire, self.dtype)
        error = None if self.error is None else self.error.reshape(self.shape)
        return Sum(total.astype(self.dtype).reshape(self.shape), error)

    def _exchange_parts(self, messages: jax.Array, wire: WireFormat) -> "SiteSum":
        sites, count = len(messages), math.prod(self.shape)
        received = lax.all_to_all(messages, self.inter, 0, 0)
        answer = codec.encode(
            codec.decode_sum(received, codec.part_length(count, sites, wire), wire, self.dtype),
            wire,
        )
        error = self.error
        if error is not None:
            wide = error.astype(codec.sum_dtype(error.dtype))
            own = codec.split(wide, sites, wire).at[lax.axis_index(self.inter)].add(answer.error)
            error = own.reshape(-1)[:count].astype(error.dtype)
        answers = lax.all_gather(answer.messages, self.inter, to="invarying")
        return dataclasses.replace(self, contents=(answers,), error=error)


def sum_over_sites(
    x: jax.Array, inter: tuple[str, ...], wire: WireFormat | None, *, keep_error: bool
) -> Sum:
    """Start, exchange and finish the sum of `x`; its derivative is that of the plain sum."""
    if wire is None or not inter or not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
        return SiteSum.start(x, inter, None, keep_error=keep_error).exchange().done()
    total, error = _sum_in_format(to_varying(x, inter), inter, wire)
    return Sum(total, error if keep_error else None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _sum_in_format(
    x: jax.Array, inter: tuple[str, ...], wire: WireFormat
) -> tuple[jax.Array, jax.Array]:
    total, error = SiteSum.start(x, inter, wire, keep_error=True).exchange().done()
    assert error is not None, "a sum that keeps its error must return it"
    return total, error


@_sum_in_format.defjvp
def _derivative(
    inter: tuple[str, ...],
    wire: WireFormat,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[Any, Any]:
    total, error = _sum_in_format(*primals, inter, wire)
    tangent = lax.psum(tangents[0], inter)
    return (total, error), (tangent, to_varying(jnp.zeros_like(error), varying_axes(error)))


def _on_link_stream(received: jax.Array) -> jax.Array:
    """Tell XLA the stream of the collective that made `received`."""
    tagged: jax.Array = set_xla_metadata(received, _xla_stream_annotation=_LINK_STREAM)
    return tagged


def _sites(inter: tuple[str, ...]) -> int:
    return math.prod(axis_sizes(inter).values())
