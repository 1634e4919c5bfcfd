"""Fetches ahead of the walk: in the order of consumption, so many from each sender at a time."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from geojax.islands.actions import Message, SiteAction, received
from geojax.transport import Fetch


class FetchWindow:
    """The fetches of one step at one site.

    Args:
        actions: the site's.
        windows: most messages from each sender that are under way or here and not taken.
        begin: begins to fetch a message from a sender.
    """

    def __init__(
        self,
        actions: Iterable[SiteAction],
        windows: Mapping[int, int],
        begin: Callable[[int, Message], Fetch],
    ):
        self._begin = begin
        self._waiting: dict[int, collections.deque[Message]] = {}
        self._fetches: dict[tuple[int, Message], Fetch] = {}
        for action in actions:
            for sender, message in received(action):
                self._waiting.setdefault(sender, collections.deque()).append(message)
        for sender in self._waiting:
            for _ in range(windows[sender]):
                self._fetch_next(sender)

    def fetch(self, sender: int, message: Message) -> Fetch:
        """Return the fetch of a message that is under way, or here and not taken."""
        return self._fetches[sender, message]

    def take(self, sender: int, message: Message) -> Sequence[jax.Array]:
        """Wait for the arrays of a message, and begin to fetch the next one of its sender.

        Raises:
            RunError: the sender is lost.
        """
        arrays = self._fetches.pop((sender, message)).result()
        self._fetch_next(sender)
        return arrays

    def _fetch_next(self, sender: int) -> None:
        if self._waiting[sender]:
            message = self._waiting[sender].popleft()
            self._fetches[sender, message] = self._begin(sender, message)
