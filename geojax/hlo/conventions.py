"""Bytes that a device sends in a collective: the convention of every count in geojax.

Each is counted as the bandwidth-optimal ring (or direct exchange) sends it, per device, with n
devices in a group and `payload` the bytes that one device puts in (its operands):

    all-reduce           2 (n - 1) / n * payload     a reduce-scatter and an all-gather of 1/n parts
    reduce-scatter         (n - 1) / n * payload     payload = the whole
    all-gather             (n - 1) * payload         payload = a shard; (n - 1) / n of the whole
    all-to-all             (n - 1) / n * payload     all but one's own part
    collective-permute     payload                   of a device that has a target
    collective-broadcast   payload                   passed along the ring
    ragged-all-to-all      (n - 1) / n * payload     an upper bound: the sizes are run-time data

What an all-reduce sends is what nccl-tests call bus bandwidth times time. Results are exact
fractions, since a payload need not divide by n; a group of one device sends nothing.
"""

from collections.abc import Callable
from fractions import Fraction


def all_reduce_bytes(payload: int, ranks: int) -> Fraction:
    """Return what each of `ranks` devices sends to sum `payload` bytes."""
    return 2 * reduce_scatter_bytes(payload, ranks)


def reduce_scatter_bytes(payload: int, ranks: int) -> Fraction:
    """Return what each of `ranks` devices sends to sum `payload` bytes and keep 1/ranks of them."""
    return Fraction(payload * (ranks - 1), ranks)


def all_gather_bytes(payload: int, ranks: int) -> Fraction:
    """Return what each of `ranks` devices sends to gather the `payload` bytes of each."""
    return Fraction(payload * (ranks - 1))


def all_to_all_bytes(payload: int, ranks: int) -> Fraction:
    """Return what each of `ranks` devices sends that holds `payload` bytes and keeps 1/ranks."""
    return Fraction(payload * (ranks - 1), ranks)


def permute_bytes(payload: int, ranks: int) -> Fraction:
    """Return what a device sends that hands its `payload` bytes to one other."""
    return Fraction(payload if ranks > 1 else 0)


BYTES_SENT: dict[str, Callable[[int, int], Fraction]] = {
    "all-reduce": all_reduce_bytes,
    "reduce-scatter": reduce_scatter_bytes,
    "all-gather": all_gather_bytes,
    "all-to-all": all_to_all_bytes,
    "collective-permute": permute_bytes,
    "collective-broadcast": permute_bytes,
    "ragged-all-to-all": all_to_all_bytes,
}
"""For each kind of collective the function (payload, ranks) -> bytes that a device sends."""
