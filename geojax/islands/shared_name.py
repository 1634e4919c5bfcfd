"""A random name that all sites share, by which the parts of one save belong together."""

import secrets

import numpy as np
from jax.sharding import Mesh

from geojax.islands.exchange import Exchange

_WORDS = 4


class SharedName:
    """The name, as one site learns it.

    Args:
        exchange: the site's.
        mesh: the site's devices.
    """

    def __init__(self, exchange: Exchange, mesh: Mesh):
        self._exchange, self._mesh = exchange, mesh
        self._name: str | None = None

    def get(self) -> str:
        """Return the name, 32 hex digits; all sites ask for it the first time together.

        The first site draws it: each of its processes one, of which that of the process that
        writes the site's manifest counts.

        Raises:
            RunError: another site is lost.
        """
        if self._name is None:
            drawn = np.frombuffer(secrets.token_bytes(4 * _WORDS), np.uint32)
            first, *_ = self._exchange.of_hosts(drawn, self._mesh)
            self._name = first.tobytes().hex()
        return self._name
