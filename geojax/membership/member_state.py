"""A site's knowledge of who takes part: one tuple, which `transition` replaces by the next."""

from typing import NamedTuple

from geojax.membership.record import MembershipRecord

UNKNOWN = -1
HALF_HEARD = -0.5
SILENT_SHARE = 2 / 3
"""Part of the eviction time after which a site that gives no sign is silent."""
MOST_QUEUED_STEPS = 64
JOIN_PAUSE_SECONDS = 30.0


class MemberState(NamedTuple):
    """A site's knowledge of who takes part; entries of tuples are by site."""

    site: int
    last_step: int
    lease: float
    """T, in seconds."""
    record: MembershipRecord | None
    """Newest record that this site has seen."""
    takes_part: bool
    applied: int
    """Steps in the state on the devices."""
    committed: int
    """Last step that this site has acted on, which its own save has."""
    acted_under: int
    """The membership_id of the last act: what an older record stopped is done again."""
    kept: int
    """Step whose sums are kept; 0: none."""
    computing: bool
    joining: bool
    """This site was admitted, and is not level with the other members yet."""
    levels: tuple[int, ...]
    """Steps that each member has applied, as it says under this record; -1: not yet."""
    has_sums: tuple[bool, ...]
    """The sums of this site's next step have come from a member."""
    later_sums: tuple[bool, ...]
    """The sums of the step after that have come from a member, which has been faster."""
    silence: tuple[float, ...]
    """Seconds since `Silent`; -1: heard; -0.5: heard, and does not say the same of this site yet;
    infinite: its process has ended."""
    was_suspended: bool = False
    """The process stood still for 2T/3 or more, and has not heard all members since."""
    watched: float = UNKNOWN
    """Seconds for which the record is known to be unchanged; -1: not watched."""
    store_asked: bool = False
    proposed: MembershipRecord | None = None
    """Record of the last swap, by which its success is known."""
    leaving: int | None = None
    """Member that this holder has told to leave, since another one does not hear it."""
    at_boundary: bool = False
    """The next step waits for the answer to a swap that admits a site."""
    most_queued: int = MOST_QUEUED_STEPS
    """Most steps whose sums are held for a returned site, besides the last one."""
    join_pause: float = JOIN_PAUSE_SECONDS
    """Longest pause for a returned site that does not become level, in seconds."""
    follower: int | None = None
    """Returned site that this holder serves: it hands it the state, and then the sums."""
    queued_from: int = 0
    """First step whose sums are held for the follower, up to the last one; 0: none."""
    level_at: int = UNKNOWN
    """Step at which the follower was level last, or else was known to have its state; -1: that is
    on its way."""
    unasked: float = 0.0
    """Seconds since the follower's last request."""
    paused: float = UNKNOWN
    """Seconds for which the members have paused for the follower; -1: they do not."""
    paused_for: tuple[int, ...] = ()
    """Returned sites for which the members have paused since these began."""
    followed: int = 0
    """The membership_id under which this returned site was handed its state; 0: its own save."""
    requests: tuple[int, ...] = ()
    """Steps in the saves of returned sites under this record; -1: not returned. A holder notes here
    which of them wait for another one."""

    @property
    def handed(self) -> int:
        """Step of the state that is on its way to the follower; 0: none."""
        return self.queued_from - 1 if self.queued_from and self.level_at < 0 else 0


def holder_of(state: MemberState) -> int:
    """Return the holder of the record under which a site takes part."""
    assert state.record is not None, "a site that takes part has a record"
    return state.record.holder


def members_of(state: MemberState) -> tuple[int, ...]:
    """Return the members of the record under which a site takes part."""
    assert state.record is not None, "a site that takes part has a record"
    return state.record.members


def replaced(values: tuple, site: int, value: object) -> tuple:
    """Return an entry by site with another value for one."""
    return (*values[:site], value, *values[site + 1 :])
