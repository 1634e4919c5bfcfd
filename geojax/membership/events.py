"""Messages between sites, events of a site, and actions that its caller does."""

from typing import NamedTuple, TypeAlias

from geojax.membership.record import MembershipRecord


class Turn(NamedTuple):
    """A member's level, sent with its sums of the next step: it acknowledges the step before."""

    sender: int
    record: MembershipRecord
    applied: int
    """Steps that the sender has applied."""
    has_sums: bool
    """The sender's sums of the next step go with it, or the last step is acknowledged."""
    asks: bool = False
    """It was sent before; who has the answer sends that again."""


class HandedOver(NamedTuple):
    """The sums of all sites of a step, or the state after it, for a site that lacks the step."""

    sender: int
    record: MembershipRecord
    step: int
    whole: bool
    """The state after the step; otherwise the sums of the step. A receiver that has the step
    already fetches nothing."""


class JoinRequest(NamedTuple):
    """A returned site's wish to take part, sent to every address until it does."""

    sender: int
    membership_id: int
    """Newest record that the sender knows; 0: none."""
    applied: int
    """Steps in its state."""
    follows: bool
    """The state was handed over, or found level, under this record; otherwise it is a save."""


class Refusal(NamedTuple):
    """The answer to a message or a sign of life with an older membership_id."""

    sender: int
    record: MembershipRecord


class Unheard(NamedTuple):
    """A member's word to the holder, which it hears, that others have been silent for T."""

    sender: int
    record: MembershipRecord
    sites: tuple[int, ...]


class Leave(NamedTuple):
    """The holder's word to a member that it is to stop, since another one does not hear it.

    It may not be evicted before: while it hears the holder it may act.
    """

    sender: int
    record: MembershipRecord


MembershipMessage: TypeAlias = Turn | HandedOver | JoinRequest | Refusal | Unheard | Leave


class Elapsed(NamedTuple):
    """Time that has passed by this site's monotonic clock since the last such event.

    It comes every second or so. After a suspension it comes before all that the guard notices then,
    and after what the guard had noticed before.
    """

    seconds: float


class Silent(NamedTuple):
    """No sign of life came from a member for two thirds of the lease, or it says that none came.

    Signs of life carry the membership_id and what `keeps` says. They count for nothing with another
    id (an older one is answered by `Refusal`), or if their sender is about to evict this site.
    """

    site: int


class Gone(NamedTuple):
    """A member's process has ended, which its guard or its host says."""

    site: int


class Heard(NamedTuple):
    """Signs of life go both ways again, from the same start of the process.

    The event comes again when `counts_back` becomes true.
    """

    site: int
    counts_back: bool = True
    """Its signs say that it counts this site as heard. A site does not say so before its own
    function has been given `Heard`: else one could evict what has begun to act again."""


class Received(NamedTuple):
    """A message of another site has arrived, with the sums or the state that go with it."""

    message: MembershipMessage


class RecordSeen(NamedTuple):
    """The store has answered a read or a swap."""

    record: MembershipRecord


class StoreUnreachable(NamedTuple):
    """The store has not answered a read or a swap, which may have been done."""


class SumsReady(NamedTuple):
    """This site's sums of a step are computed."""

    membership_id: int
    step: int


MembershipEvent: TypeAlias = (
    Elapsed | Silent | Gone | Heard | Received | RecordSeen | StoreUnreachable | SumsReady
)


class SendTo(NamedTuple):
    """Send a message; a turn with sums takes this site's sums of the next step along."""

    site: int
    message: MembershipMessage


class ReadRecord(NamedTuple):
    """Read the record, and answer by `RecordSeen` or `StoreUnreachable`."""


class SwapRecord(NamedTuple):
    """Compare and set the record, and answer by `RecordSeen` or `StoreUnreachable`."""

    expected: MembershipRecord
    new: MembershipRecord


class ComputeSums(NamedTuple):
    """Compute this site's sums of a step from the state before it, and tell by `SumsReady`.

    Work on the step under an earlier record is thrown away, with its error feedback.
    """

    record: MembershipRecord
    step: int


class ApplySums(NamedTuple):
    """Add the sums of all members, or take those that `source` handed over, and update the state.

    The sums stay until `ReleaseSums`.
    """

    step: int
    membership_id: int
    source: int | None


class TakeState(NamedTuple):
    """Replace this site's state by the one that was handed over."""

    step: int


class RestoreSave(NamedTuple):
    """Go back to this site's own state after the last step that it has committed."""

    step: int


class CommitStep(NamedTuple):
    """Act on a step that counts: complete what the sites share of it, with the membership_id.

    Who receives it refuses an older id than it knows.
    """

    step: int
    membership_id: int


class ReleaseSums(NamedTuple):
    """Drop the sums of a step, which all members have applied."""

    step: int


class StopActing(NamedTuple):
    """Neither compute nor save nor publish: this site is no member of the record."""

    record: MembershipRecord


class WaitFor(NamedTuple):
    """Say what this site waits for."""

    reason: str


MembershipAction: TypeAlias = (
    SendTo
    | ReadRecord
    | SwapRecord
    | ComputeSums
    | ApplySums
    | TakeState
    | RestoreSave
    | CommitStep
    | ReleaseSums
    | StopActing
    | WaitFor
)
