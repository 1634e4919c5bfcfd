"""A transport to nobody: what is offered is dropped, and zeros come at once."""

import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from geojax.transport.link_clock import MeasuredLink
from geojax.transport.protocol import (
    MessageKey,
    PeerCounters,
    SocketFigures,
    ToldFigures,
    Transport,
)


def mute(site: int, site_names: Sequence[str]) -> Transport:
    """Return the transport of a site whose messages come from nobody and go to nobody.

    Args:
        site: the site.
        site_names: the site of each number.
    """
    return _Mute(site, site_names)


class _Mute:
    """One site's end; `geojax.transport.protocol.Transport` documents its methods."""

    def __init__(self, site: int, site_names: Sequence[str]):
        self.site, self.sites, self.site_names = site, len(site_names), site_names
        self.counters: Mapping[int, PeerCounters] = {
            other: PeerCounters() for other in range(self.sites) if other != site
        }

    def offer(
        self,
        receiver: int,
        key: MessageKey,
        arrays: Sequence[jax.Array],
        *,
        yields: bool = False,
    ) -> None:
        pass

    def fetch(self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]) -> "_Zeros":
        return _Zeros(like)

    def check(self) -> None:
        pass

    def measured(self) -> Mapping[int, MeasuredLink]:
        return {}

    def tell(self, receiver: int, figures: bytes) -> None:
        pass

    def told(self, sender: int) -> ToldFigures | None:
        return None

    def socket_figures(self) -> Mapping[int, SocketFigures]:
        return {}

    def drain(self) -> None:
        pass

    def close(self, *, failed: bool = False) -> None:
        pass


class _Zeros:
    """A message of zeros; `geojax.transport.protocol.Fetch` documents it."""

    def __init__(self, like: Sequence[jax.ShapeDtypeStruct]):
        self._like = like
        self.arrival: float | None = time.monotonic()

    def arrived(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True

    def result(self, timeout_seconds: float | None = None) -> list[jax.Array]:
        return zeros(self._like)


def zeros(like: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return zeros like arrays, for which nothing is compiled."""
    return [_zeros(each) for each in like]


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    assert like.sharding is not None, "a message lies on devices"
    shard = np.zeros(like.sharding.shard_shape(like.shape), like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda place: shard)
