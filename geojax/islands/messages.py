"""The messages of one walk through a list of actions, between trees of arrays and the transport."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from geojax.islands.actions import Message, SiteAction
from geojax.islands.fetch_window import FetchWindow
from geojax.islands.programs import SitePrograms
from geojax.transport import Fetch, MessageKey, Transport


class Messages:
    """Offers and fetches of one walk.

    Args:
        number: the walk's, by which its messages differ from those of others; the same at all
            sites.
        actions: the site's.
        windows: messages to fetch ahead from each other site (see `geojax.islands.actions`).
        programs: the site's.
        transport: joins the site to the others.
    """

    def __init__(
        self,
        number: int,
        actions: Sequence[SiteAction],
        windows: Mapping[int, int],
        programs: SitePrograms,
        transport: Transport,
    ):
        self._number, self._programs, self._transport = number, programs, transport
        self._window = FetchWindow(actions, windows, self._begin_fetch)

    def offer(self, receiver: int, message: Message, payload: Any) -> None:
        """Offer the payload of a message.

        Raises:
            RunError: another site is lost.
        """
        key = MessageKey(self._number, *message)
        self._transport.offer(receiver, key, jax.tree.leaves(payload))

    def fetch(self, sender: int, message: Message) -> Fetch:
        """Return the fetch of a message that is under way, or here and not taken."""
        return self._window.fetch(sender, message)

    def take(self, sender: int, message: Message) -> Any:
        """Wait for a message of another site.

        Raises:
            RunError: the site is lost.
        """
        structure = jax.tree.structure(self._programs.payload(message))
        return jax.tree.unflatten(structure, self._window.take(sender, message))

    def _begin_fetch(self, sender: int, message: Message) -> Fetch:
        like = jax.tree.leaves(self._programs.payload(message))
        return self._transport.fetch(sender, MessageKey(self._number, *message), like)
