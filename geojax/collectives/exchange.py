"""The sum of an array over sites: start, exchange, done.

Numbers cross as they are, in a `psum`, or in messages of a wire format
(`geojax.collectives.wire_format`). Two sites swap one message each, and both decode and add them:

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
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from geojax.collectives.axes import (
    agreed,
    axis_sizes,
    collective_scope,
    drop_single,
    to_varying,
    varying_axes,
)
from geojax.collectives.wire_format import (
    WireFormat,
    decode_parts,
    decode_sum,
    encode_numbers,
    part_length,
    split_parts,
    sum_dtype,
)
from geojax.runtime.platform import GPU, site_exchange, target_platform

_LINK_STREAM = "2"
"""The communication stream of sums over sites that travel beside other collectives, which XLA deals
out among the streams 0 and 1."""

SITE_STREAM = "3"
"""That of collectives in a site that do."""


class SumWithError(NamedTuple):
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
    """The array, once exchanged its sums, perhaps as a vector; or messages. Those of two sites are
    the own [length] and, once exchanged, the other's, or both gathered [2, length]. Those of more
    are [sites, length] for the owners and, once exchanged, their answers."""
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
            encoded = encode_numbers(to_varying(x.reshape(x.size), inter), wire, parts)
            contents, error = (encoded.messages,), encoded.error if keep_error else None
        return cls(contents, error, x.shape, x.dtype, crosses, wire, keep_error)

    @property
    def kind(self) -> Hashable:
        """The properties that sums in one message have in common."""
        (content,) = self.contents
        sizes = axis_sizes(varying_axes(content))
        long_axes = frozenset(axis for axis, size in sizes.items() if size > 1)
        return self.inter, self.wire, self.dtype, long_axes

    def exchange(self, *, own_stream: bool = False) -> "SiteSum":
        """Send to the other sites, and receive (see `exchange_together`)."""
        (exchanged,) = exchange_together([self], own_stream=own_stream)
        return exchanged

    def done(self) -> SumWithError:
        """Decode: the same bits on all sites, not varying over `inter`."""
        if self.wire is None:
            total = self.contents[0].reshape(self.shape)
            return SumWithError(total, jnp.zeros_like(total) if self.keep_error else None)
        count = math.prod(self.shape)
        if _sites(self.inter) == 2:  # the sum of two does not depend on which comes first
            messages = self.contents if len(self.contents) == 2 else self.contents[0]
            total = decode_sum(messages, count, self.wire, self.dtype)
            total = agreed(total, self.inter)
        else:
            total = decode_parts(self.contents[0], count, self.wire, self.dtype)
        error = None if self.error is None else self.error.reshape(self.shape)
        return SumWithError(total.astype(self.dtype).reshape(self.shape), error)

    def _answer(self, received: jax.Array) -> "SiteSum":
        """Sum and encode the part that this site owns, of messages from all: an own answer."""
        (messages,), wire = self.contents, self.wire
        assert wire is not None, "parts are messages"
        sites, count = len(messages), math.prod(self.shape)
        answer = encode_numbers(
            decode_sum(received, part_length(count, sites, wire), wire, self.dtype),
            wire,
        )
        error = self.error
        if error is not None:
            wide = error.astype(sum_dtype(error.dtype))
            own = split_parts(wide, sites, wire).at[lax.axis_index(self.inter)].add(answer.error)
            error = own.reshape(-1)[:count].astype(error.dtype)
        return dataclasses.replace(self, contents=(answer.messages,), error=error)


def exchange_together(sums: Sequence[SiteSum], *, own_stream: bool = False) -> list[SiteSum]:
    """Send sums of one kind to the other sites in one message, and receive theirs.

    It is the only phase in which anything crosses. With `own_stream`, on GPUs on a stream that no
    other collective uses. All otherwise share communication stream 0: what crosses a long link
    would hold up those inside the site.
    """
    inter, wire, contents = sums[0].inter, sums[0].wire, [each.contents[0] for each in sums]
    assert len({each.kind for each in sums}) == 1, "sums in one message must be of one kind"
    if not inter:
        return list(sums)
    sites = _sites(inter)
    on_stream = functools.partial(on_own_stream, stream=_LINK_STREAM if own_stream else None)
    received: Iterable[tuple[jax.Array, ...]]
    match site_exchange(target_platform(), sites, messages=wire is not None):
        case "psum":
            if len(contents) > 1:
                contents = [x.reshape(x.size) for x in contents]
            received = zip(_at_once(lambda x: on_stream(_summed(x, inter)), contents))
        case "permute":
            others = _at_once(lambda x: on_stream(_swapped(x, inter)), contents)
            received = zip(contents, others, strict=True)
        case "all_gather":
            received = zip(_at_once(lambda x: on_stream(_gathered(x, inter)), contents))
        case "all_to_all":
            parts = _at_once(lambda x: _dealt_out(x, inter), contents)
            sums = [each._answer(part) for each, part in zip(sums, parts, strict=True)]
            answers = [each.contents[0] for each in sums]
            received = zip(_at_once(lambda x: _gathered(x, inter), answers))
    pairs = zip(sums, received, strict=True)
    return [dataclasses.replace(each, contents=made) for each, made in pairs]


def _at_once(
    collective: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Apply a collective to arrays in one message, joined along their last dim.

    The arrays differ in that dim alone; a single one may be of any shape.
    """
    if len(arrays) == 1:
        return [collective(arrays[0])]
    joined = collective(jnp.concatenate(arrays, axis=-1))
    ends = itertools.accumulate(array.shape[-1] for array in arrays)
    parts = jnp.split(joined, list(ends)[:-1], axis=-1)
    return [
        drop_single(part, varying_axes(part) - varying_axes(array))
        for part, array in zip(parts, arrays, strict=True)
    ]


def _gathered(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    with collective_scope("all_gather", axes):
        gathered: jax.Array = lax.all_gather(x, axes, to="invarying")
    return gathered


def _summed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    with collective_scope("psum", axes):
        return lax.psum(x, axes)


def _swapped(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the array of the other one of two sites."""
    with collective_scope("ppermute", axes):
        return lax.ppermute(x, axes, [(0, 1), (1, 0)])


def _dealt_out(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Send row s of `x` to site s; return what all sites sent to this one."""
    with collective_scope("all_to_all", axes):
        return lax.all_to_all(x, axes, 0, 0)


def sum_over_sites(
    x: jax.Array, inter: tuple[str, ...], wire: WireFormat | None, *, keep_error: bool
) -> SumWithError:
    """Start, exchange and finish the sum of `x`; its derivative is that of the plain sum."""
    if wire is None or not inter or not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
        return SiteSum.start(x, inter, None, keep_error=keep_error).exchange().done()
    total, error = _sum_in_format(to_varying(x, inter), inter, wire)
    return SumWithError(total, error if keep_error else None)


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
    tangent = _summed(tangents[0], inter)
    return (total, error), (tangent, to_varying(jnp.zeros_like(error), varying_axes(error)))


def on_own_stream(received: jax.Array, stream: str | None) -> jax.Array:
    """Tell XLA for GPUs the stream of the collective that made `received`; None: the usual one."""
    if stream is None or target_platform() is not GPU:
        return received
    tagged: jax.Array = set_xla_metadata(received, _xla_stream_annotation=stream)
    return tagged


def _sites(inter: tuple[str, ...]) -> int:
    return math.prod(axis_sizes(inter).values())
