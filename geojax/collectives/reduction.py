"""Sums in two phases: inside a site over the axes `intra`, between sites over the axes `inter`.

A flat all-reduce over both would send nearly twice the tensor through every device's share of the
long link. In two phases a rank first owns the site's sum of 1/ranks of the tensor, and only that
part crosses (the hierarchical all-reduce of multi-data-center training):

    all_reduce        psum_scatter(intra) -> psum(inter) -> all_gather(intra)
    reduce_scatter    psum_scatter(intra) -> psum(inter)

Both work on pytrees inside `jax.shard_map`, under `check_vma=True` or False. `intra` and `inter`
are an axis name or several; with several, ranks are counted with the last name fastest, as in a
PartitionSpec. An axis of size 1 costs nothing, and `inter` may be empty. Derivatives are those of
the plain `psum` of the same values: linear.

Start, exchange, done. `start_all_reduce` and `start_reduce_scatter` sum inside the site and encode.
`exchange` is the only phase that crosses `inter`, and sends only the messages. `done` decodes, and
gathers inside the site. `all_reduce` and `reduce_scatter` are the three in a row. A loop that
computes something else carries a `Reduction` from iteration to iteration, and begins with
`exchange` of the last iteration's sum. Nothing in the iteration then waits for the messages, and
messages share no memory with the computed values. (XLA's runtime for CPUs needs that: operations
that reuse temporary memory wait for each other, though no data flow between them.)

Buckets. `bucket_bytes` bounds the bytes of one message inside the site: all ranks' blocks together,
in the leaf's dtype. For each bucket, 1/ranks of these bytes cross `inter` on each device. Long
leaves are split, short ones merged with their neighbors of the same dtype and the same varying axes
(`geojax.collectives.buckets`). Buckets do not depend on one another, so the phase inside the site
of one may run beside the phase between sites of others. None: every leaf is one bucket, sent as it
lies, without a copy unless it needs padding. "auto": `WIRE_BUCKET_BYTES` with a wire format, None
without. A message of a format is a collective of ours, which XLA does not join with others, and
each waits for the link's round trip. Sums without a format are all-reduces: XLA joins small ones up
to its own threshold, and nothing is gained where long ones are split. In a site of many ranks,
whose devices each send 1/ranks of a bucket, larger buckets than these are better.

Wire formats. `wire` is how floating-point numbers cross `inter`, in fewer bytes, instead of in a
`psum` in the leaf's dtype (`geojax.collectives.exchange`). Inside a site numbers are always sent in
the leaf's dtype. With `error_feedback` what rounding took away is added to the next sum.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, overload

import jax

from geojax.collectives.axes import AxisNames, SiteAxes
from geojax.collectives.exchange import SiteSum, sum_over_sites
from geojax.collectives.like_trees import PyTree
from geojax.collectives.tree_buckets import (
    BlockBuckets,
    FlatBuckets,
    SummedTree,
    block_buckets,
    flat_buckets,
)
from geojax.collectives.wire_format import WireFormat, block_of
from geojax.errors import UserError

Tree = TypeVar("Tree")
BucketBytes: TypeAlias = int | Literal["auto"] | None

WIRE_BUCKET_BYTES = 64 * 2**20
"""The most bytes of a message inside the site, with a wire format and bucket_bytes="auto"."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sums"], meta_fields=["buckets", "keep_errors"]
)
@dataclass(frozen=True)
class Reduction:
    """A sum over all ranks of `intra` and `inter` that is under way; a pytree."""

    sums: tuple[SiteSum, ...]
    """The sum over sites of each bucket."""
    buckets: FlatBuckets | BlockBuckets
    keep_errors: bool

    @property
    def bytes_in_site(self) -> list[int]:
        """The bytes of each bucket inside the site, which `bucket_bytes` limits."""
        ranks = self.buckets.axes.ranks
        return [ranks * math.prod(each.shape) * each.dtype.itemsize for each in self.sums]

    def exchange(self) -> "Reduction":
        """Exchange the messages of all buckets between sites (see `exchange_together`)."""
        return dataclasses.replace(self, sums=tuple(each.exchange() for each in self.sums))

    def done(self) -> Any:
        """Return what the operation in one piece returns, of messages that were exchanged."""
        return _result(self.buckets.join([each.done() for each in self.sums]), self.keep_errors)


@overload
def all_reduce(
    tree: Tree,
    intra: AxisNames,
    inter: AxisNames,
    *,
    bucket_bytes: BucketBytes = "auto",
    wire: WireFormat | None = None,
    error_feedback: None = None,
) -> Tree: ...
@overload
def all_reduce(
    tree: Tree,
    intra: AxisNames,
    inter: AxisNames,
    *,
    bucket_bytes: BucketBytes = "auto",
    wire: WireFormat | None = None,
    error_feedback: Tree,
) -> tuple[Tree, Tree]: ...
def all_reduce(
    tree: Any,
    intra: AxisNames,
    inter: AxisNames,
    *,
    bucket_bytes: BucketBytes = "auto",
    wire: WireFormat | None = None,
    error_feedback: Any = None,
) -> Any:
    """Sum `tree` over all ranks of `intra` and `inter`; the result is the same on each of them.

    Args:
        tree: any registered tree of arrays of any shape, scalars among them; a bucket is padded
            where it does not divide.
        intra: the axes inside a site.
        inter: the axes between sites. Without any longer than 1, the sum is one psum over `intra`.
        bucket_bytes: the most bytes of one message inside the site; None, a message for each leaf;
            "auto", 64 MiB with a wire format and a message for each leaf without.
        wire: the format in which numbers cross `inter`; None, as they are (see the module).
        error_feedback: the errors of the sum before, like `tree`, equal on all ranks of `intra`;
            zeros at first. They are added, and the errors of this sum are returned too.

    Returns:
        Sums in the leaves' shapes and dtypes. They vary over neither `intra` nor `inter`, so that
        `out_specs=P()` is accepted; over other axes as the leaf did. With `error_feedback` a pair:
        the sums and this site's errors, zero where nothing was rounded, which vary over `inter` and
        not over `intra`.

    Raises:
        UserError: an unknown axis or one named twice, a boolean leaf, errors unlike `tree`, or
            buckets that cannot hold an element for each rank.

    Example:
        >>> mesh = geojax.make_mesh(dc=2, data=4)  # two sites of four devices
        >>> def step(x):  # [1], this device's own number
        ...     return all_reduce(x, "data", "dc")
        >>> program = jax.shard_map(step, mesh=mesh, in_specs=P(("dc", "data")), out_specs=P())
        >>> jax.jit(program)(jnp.arange(8.0)).tolist()
        [28.0]
    """
    axes = SiteAxes.resolve(intra, inter)
    buckets, shares = flat_buckets(
        tree, error_feedback, axes, _limit(bucket_bytes, wire), block_of(wire)
    )
    return _reduce(buckets, shares, wire, keep_errors=error_feedback is not None)


def start_all_reduce(
    tree: Any,
    intra: AxisNames,
    inter: AxisNames,
    *,
    bucket_bytes: BucketBytes = "auto",
    wire: WireFormat | None = None,
    error_feedback: Any = None,
    own_stream: bool = False,
) -> Reduction:
    """Start an `all_reduce`, which has the same arguments: sum inside the site, and encode.

    Unlike `all_reduce` it has no derivative where there is a wire format. With `own_stream`, on
    GPUs the sum inside the site is on a stream that no other collective uses.

    Example:
        >>> mesh = geojax.make_mesh(dc=2, data=4)
        >>> def step(x):
        ...     reduction = start_all_reduce(x, "data", "dc", wire=INT8)
        ...     # Compute something else here, while the messages travel.
        ...     return reduction.exchange().done()
        >>> program = jax.shard_map(step, mesh=mesh, in_specs=P(("dc", "data")), out_specs=P())
        >>> jax.jit(program)(jnp.ones(8)).tolist()
        [8.0]
    """
    axes = SiteAxes.resolve(intra, inter)
    limit = _limit(bucket_bytes, wire)
    buckets, shares = flat_buckets(
        tree, error_feedback, axes, limit, block_of(wire), own_stream=own_stream
    )
    return _start(buckets, shares, wire, keep_errors=error_feedback is not None)


@overload
def reduce_scatter(
    tree: Tree,
    intra: AxisNames,
    inter: AxisNames,
    *,
    dims: PyTree,
    bucket_bytes: BucketBytes = "auto",
    wire: WireFormat | None = None,
    error_feedback: None = None,
) -> Tree: ...
@overload
def reduce_scatter(
    tree: Tree,
    intra: AxisNames,
    inter: AxisNames,
    *,
    dims: PyTree,
    bucket_bytes: BucketBytes = "auto",
    wire: WireFormat | None = None,
    error_feedback: Tree,
) -> tuple[Tree, Tree]: ...
def reduce_scatter(
    tree: Any,
    intra: AxisNames,
    inter: AxisNames,
    *,
    dims: PyTree,
    bucket_bytes: BucketBytes = "auto",
    wire: WireFormat | None = None,
    error_feedback: Any = None,
) -> Any:
    """Sum `tree` over `intra` and `inter`; each rank of `intra` keeps its block.

    Args:
        tree: arrays of one dimension or more.
        intra: the axes inside a site, over whose ranks the result is scattered.
        inter: the axes between sites; every site ends with the same shards.
        dims: the dimension along which each leaf is scattered: one int for all, or a tree.
        bucket_bytes: the most bytes of one message inside the site; None, a message for each leaf;
            "auto", 64 MiB with a wire format and a message for each leaf without.
        wire: the format in which numbers cross `inter`; None, as they are (see the module).
        error_feedback: the errors of the sum before, like the shards; zeros at first. They are
            added, and the errors of this sum are returned too.

    Returns:
        The shards: a leaf [.., size, ..] becomes [.., block, ..] with block = ceil(size / ranks).
        Rank r holds the entries from r * block on, and zeros past the end of the leaf. They vary
        over `intra` (its axes of size 1 too) and not over `inter`; over other axes as the leaf did.
        With `error_feedback` a pair: the shards and this site's errors, zero where nothing was
        rounded, which vary over `inter` too.

    Raises:
        UserError: as `all_reduce`; or a scalar leaf, `dims` that do not fit, or a leaf that differs
            along `intra` and not along `inter`: a gradient summed there already.

    Example:
        >>> mesh = geojax.make_mesh(dc=2, data=4)
        >>> def step(x):  # [8], the same on every device, to [2], a device's block of the sum
        ...     return reduce_scatter(x, "data", "dc", dims=0)
        >>> program = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P("data"))
        >>> jax.jit(program)(jnp.arange(8)).tolist()
        [0, 8, 16, 24, 32, 40, 48, 56]
    """
    axes = SiteAxes.resolve(intra, inter)
    buckets, blocks = block_buckets(
        tree, error_feedback, dims, axes, _limit(bucket_bytes, wire), block_of(wire)
    )
    return _reduce(buckets, blocks, wire, keep_errors=error_feedback is not None)


def start_reduce_scatter(
    tree: Any,
    intra: AxisNames,
    inter: AxisNames,
    *,
    dims: PyTree,
    bucket_bytes: BucketBytes = "auto",
    wire: WireFormat | None = None,
    error_feedback: Any = None,
    own_stream: bool = False,
) -> Reduction:
    """Start a `reduce_scatter`, which has the same arguments: sum inside the site, and encode.

    Unlike `reduce_scatter` it has no derivative where there is a wire format. `own_stream` is that
    of `start_all_reduce`.
    """
    axes = SiteAxes.resolve(intra, inter)
    limit = _limit(bucket_bytes, wire)
    buckets, blocks = block_buckets(
        tree, error_feedback, dims, axes, limit, block_of(wire), own_stream=own_stream
    )
    return _start(buckets, blocks, wire, keep_errors=error_feedback is not None)


def _limit(bucket_bytes: BucketBytes, wire: WireFormat | None) -> int | None:
    if bucket_bytes == "auto":
        return None if wire is None else WIRE_BUCKET_BYTES
    if bucket_bytes is not None and not isinstance(bucket_bytes, int):
        raise UserError(
            f"collectives: bucket_bytes={bucket_bytes!r:.60} is no number of bytes; give an int, "
            "None for a message a leaf, or 'auto'"
        )
    return bucket_bytes


def _start(
    buckets: FlatBuckets | BlockBuckets,
    arrays: list[jax.Array],
    wire: WireFormat | None,
    *,
    keep_errors: bool,
) -> Reduction:
    inter = buckets.axes.inter
    sums = tuple(SiteSum.start(x, inter, wire, keep_error=keep_errors) for x in arrays)
    return Reduction(sums, buckets, keep_errors)


def _reduce(
    buckets: FlatBuckets | BlockBuckets,
    arrays: list[jax.Array],
    wire: WireFormat | None,
    *,
    keep_errors: bool,
) -> Any:
    """Start, exchange and finish, bucket by bucket, with the derivative of a plain sum."""
    inter = buckets.axes.inter
    sums = [sum_over_sites(x, inter, wire, keep_error=keep_errors) for x in arrays]
    return _result(buckets.join(sums), keep_errors)


def _result(summed: SummedTree, keep_errors: bool) -> Any:
    return (summed.total, summed.errors) if keep_errors else summed.total
