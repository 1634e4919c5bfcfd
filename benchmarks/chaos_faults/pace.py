"""Steps that pass around a fault."""

from typing import NamedTuple


class Pace(NamedTuple):
    """Steps that pass around each fault of a campaign."""

    before: int
    """Most steps from the end of one fault to the next, which the seed draws."""
    bad_link: int
    """Most steps for which a link is bad, and most resets."""
    gone_on: int
    """Steps that the others do without a silent site before it is heard again."""
    unnoticed: int
    """Steps after a fault that nobody is to notice."""
    level: int | None
    """Steps of all sites together after a return; None: the record has all sites, which is enough.

    The next fault then comes in the first step of all."""


USUAL = Pace(before=20, bad_link=30, gone_on=4, unnoticed=5, level=5)
CLOSE = Pace(before=0, bad_link=1, gone_on=0, unnoticed=0, level=None)
"""Faults in as few steps as sites return in."""
