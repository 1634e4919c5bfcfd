"""Times of the actions of one step at one site."""

from collections.abc import Sequence
from typing import NamedTuple

from geojax.islands.actions import SiteAction


class Recorded(NamedTuple):
    """Times of an action, on the monotonic clock of its host."""

    action: SiteAction
    start: float
    """When the host came to it."""
    taken: float
    """When its messages were taken; the start where it takes none."""
    dispatched: float
    """When its programs were dispatched and its messages offered."""
    end: float
    """When the devices had run its programs."""
    arrivals: tuple[float, ...]
    """When each message that it takes was here, in the order of `received`."""


Record = Sequence[Recorded]
"""A step of a site, action by action."""
