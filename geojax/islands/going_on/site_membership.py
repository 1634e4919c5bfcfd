"""Who takes part, as one site sees it: events come in, and what follows from them is done.

    links, notes of other sites, the clock, the store
        → events → `geojax.membership.transition` → actions
    actions: notes to other sites, requests to the store, and work on steps, for `going_on.steps`

Everything but the wait for the store happens in the main thread, wherever it waits for other sites.

Sums of a step that come in the walk's messages are the turn of their sender: it has applied the
step before. Turns travel as notes after a change of the record alone.
"""

import contextlib
import functools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from geojax.errors import FencedError, RunError
from geojax.islands.actions import shares_of_members
from geojax.islands.going_on.asked_store import AskedStore
from geojax.islands.going_on.ticks import Ticks
from geojax.islands.programs.values import StepSums
from geojax.membership.events import (
    ApplySums,
    ComputeSums,
    Elapsed,
    Gone,
    HandedOver,
    Heard,
    MembershipAction,
    MembershipEvent,
    MembershipMessage,
    ReadRecord,
    Received,
    ReleaseSums,
    RestoreSave,
    SendTo,
    Silent,
    StopActing,
    SumsReady,
    SwapRecord,
    TakeState,
    Turn,
    WaitFor,
)
from geojax.membership.notes import as_note, message_of
from geojax.membership.record import MembershipRecord, RecordStore
from geojax.membership.transition import MemberState, member, transition
from geojax.transport import CarrierTransport, Fetch, LostPeerError, MessageKey
from geojax.transport.peer_link import PeerLink

_POLL_SECONDS = 0.002


class InterruptedStepError(RunError):
    """The sites that take part have changed, so that the step begins again."""


class _HandedSums:
    """Sums of a step on their way from another site.

    Args:
        note: the note that they are sent.
        fetches: one of each message.
        like: the sums, as `jax.ShapeDtypeStruct`s.
    """

    def __init__(self, note: HandedOver, fetches: Sequence[Fetch], like: StepSums):
        self.note, self._fetches, self._like = note, fetches, like

    def arrived(self) -> bool:
        """Return True if all are here."""
        return all(fetch.arrived() for fetch in self._fetches)

    def result(self) -> StepSums:
        """Return the sums, which have arrived."""
        parts = [
            jax.tree.unflatten(jax.tree.structure(like), fetch.result())
            for fetch, like in zip(self._fetches, _messages(self._like), strict=True)
        ]
        return StepSums(parts[:-1], parts[-1])


class SiteMembership:
    """The membership of one site.

    Args:
        transport: joins the site to all others.
        store: has the record.
        place: name of the store, as lines of the log show it.
        lease_seconds: a site that is silent for so long is evicted.
        tell: shows an event at a step to the user.
    """

    def __init__(
        self,
        transport: CarrierTransport,
        store: RecordStore,
        place: str,
        lease_seconds: float,
        tell: Callable[[int, str], None],
    ):
        self.transport = transport
        self.store, self._asked = store, AskedStore(store, lease_seconds / 3)
        self.place, self._lease, self._tell = place, lease_seconds, tell
        self._state: MemberState | None = None
        self._ticks = Ticks()
        self._computing: ComputeSums | None = None
        self._applying: ApplySums | None = None
        self._at_work: ComputeSums | None = None
        self._like: StepSums
        self.saved = 0
        """Steps in the state with which this site has begun."""
        self._kept: tuple[int, StepSums] | None = None
        """The sums of the last step that this site has applied, with its number."""
        self._ahead: list[Turn] = []
        """Turns of sites that have applied the step of which this one still takes the sums."""
        self._handed_to: set[tuple[int, int]] = set()
        """Sites and steps whose sums were handed over under this record."""
        self._handed: _HandedSums | None = None
        self._received: StepSums | None = None
        """Sums that were handed over, and not applied yet."""
        self._reasons: dict[int, str] = {}
        """Reason why a site is lost."""
        self._silent: set[int] = set()
        """Sites that this one does not hear."""
        self._said: str | None = None

    def begin(
        self, record: MembershipRecord, sums: StepSums, *, saved: int, last_step: int
    ) -> None:
        """Take part from now on.

        Args:
            record: of all sites.
            sums: the sums of a step, as `jax.ShapeDtypeStruct`s.
            saved: steps in the state of all sites.
            last_step: last step of the run.
        """
        self._like, self.saved = sums, saved
        self._ticks.take()
        self._state, actions = member(
            self.transport.site,
            self.transport.sites,
            record,
            last_step=last_step,
            lease=self._lease,
            saved=saved,
        )
        for action in actions:
            self._do(action)

    def is_open(self) -> bool:
        """Return True while a site is silent or lost, and takes part as long as the record says."""
        state = self._state
        return state is not None and state.takes_part and max(state.silence) >= 0

    @property
    def record(self) -> MembershipRecord:
        """The newest record that this site takes part under."""
        assert self._state is not None, "the run has begun"
        assert self._state.record is not None, "a site that takes part has a record"
        return self._state.record

    def work_on(self, step: int) -> ComputeSums | ApplySums:
        """Wait for what is to be done of a step: compute sums, or take those of another site.

        Raises:
            FencedError: the run goes on without this site.
        """
        while True:
            self.poll()
            if self._applying is not None and self._applying.step == step:
                return self._applying
            if self._computing is not None and self._computing.step == step:
                return self._computing
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def at_work(self, work: ComputeSums) -> Iterator[Callable[[StepSums], None]]:
        """Let `check` interrupt the code inside when the work begins again.

        Yields:
            The function that takes the sums of all sites, after which the step is applied; it
            raises `InterruptedStepError` if the step begins again.
        """
        self._at_work = work
        try:
            yield functools.partial(self._summed, work)
        finally:
            self._at_work = None

    def check(self) -> None:
        """Take in what has happened.

        Raises:
            InterruptedStepError: the step that is under way begins again.
            FencedError: the run goes on without this site.
        """
        self.poll()
        if self._at_work is not None and self._computing is not self._at_work:
            raise InterruptedStepError("the step begins again")

    def _summed(self, work: ComputeSums, sums: StepSums) -> None:
        self.check()
        record = work.record
        for site in record.members:
            if site != self.transport.site:
                self._take(Received(Turn(site, record, work.step - 1, has_sums=True)))
        self._take(SumsReady(record.membership_id, work.step))
        assert self._applying == ApplySums(work.step, record.membership_id, source=None), (
            "sums of all members are applied"
        )
        self._kept = work.step, sums
        ahead, self._ahead = self._ahead, []
        for turn in ahead:
            self._take(Received(turn))

    def handed(self, work: ApplySums) -> StepSums:
        """Return the sums of a step that another site has handed over."""
        sums, self._received = self._received, None
        assert sums is not None, f"the sums of step {work.step} are here"
        return sums

    def poll(self) -> None:
        """Take in what has happened, and do what follows.

        Raises:
            FencedError: the run goes on without this site.
            RunError: it has not begun, and a site is lost.
        """
        if self._state is None:
            self.transport.check()
            return
        for seconds in self._ticks.take():
            self._take(Elapsed(seconds))
        for site, link in list(self.transport.links.items()):
            if (event := self._noticed(site, link)) is not None:
                self._take(event)
        with contextlib.suppress(queue.Empty):
            while True:
                self._read(*self.transport.notes.get_nowait())
        if self._handed is not None and self._handed.arrived():
            handed, self._handed = self._handed, None
            self._received = handed.result()
            self._kept = handed.note.step, self._received
            self._take(Received(handed.note))
        while (answer := self._asked.answer()) is not None:
            self._take(answer)

    def close(self) -> None:
        """End the threads."""
        self._ticks.close()
        self._asked.close()

    def _noticed(self, site: int, link: PeerLink) -> MembershipEvent | None:
        """Return what a link tells of a site that it has not told before."""
        assert self._state is not None, "the run has begun"
        control = link.control
        if control.finished or site in self._reasons:
            return None
        try:
            link.check()
        except LostPeerError:
            if control.lost is None:  # it could not be sent a message, or take one
                raise
            self._reasons[site] = control.lost
            return Gone(site)
        is_silent = control.silent_seconds >= self._lease * 2 / 3
        if is_silent == (self._state.silence[site] >= 0):
            return None
        if is_silent:
            self._silent.add(site)
            return Silent(site)
        self._silent.discard(site)
        return Heard(site)

    def _read(self, site: int, note: bytes) -> None:
        assert self._state is not None, "the run has begun"
        message = message_of(note, site)
        match message:
            case Turn(_, record, applied):
                is_ahead = record == self._state.record and applied > self._state.applied
                if is_ahead and self._state.computing:  # its sums are on their way
                    self._ahead.append(message)
                    return
                # Sums count when they are here.
                has_sums = message.has_sums and applied == self._state.last_step
                self._take(Received(message._replace(has_sums=has_sums)))
            case HandedOver():
                self._fetch_sums(message)
            case _:
                self._take(Received(message))

    def _fetch_sums(self, note: HandedOver) -> None:
        """Fetch the sums of the step that this site lacks, before it counts as told of them."""
        assert self._state is not None, "the run has begun"
        is_next = note.record == self._state.record and note.step == self._state.applied + 1
        if not is_next or self._handed is not None:
            return
        with contextlib.suppress(LostPeerError):  # another member has the sums too, or none has
            fetches = [
                self.transport.fetch(note.sender, _key(note, number), jax.tree.leaves(message))
                for number, message in enumerate(_messages(self._like))
            ]
            self._handed = _HandedSums(note, fetches, self._like)

    def _take(self, event: MembershipEvent) -> None:
        assert self._state is not None, "the run has begun"
        before = self._state.record
        self._state, actions = transition(self._state, event)
        if self._state.takes_part and self._state.record != before:
            assert before is not None, "a member has a record"
            self._adopt(before)
        for action in actions:
            self._do(action)

    def _adopt(self, before: MembershipRecord) -> None:
        """Let go of the sites that take part no more, and of the work under the record before."""
        record = self.record
        self._computing = self._handed = None
        self._handed_to.clear()
        self._ahead.clear()
        for site in set(before.members) - set(record.members):
            if site in self.transport.links:
                self.transport.give_up(site)
        self.transport.withdraw(record.membership_id)
        assert self._state is not None, "the run has begun"
        self._tell(self._state.applied + 1, self._described(before))

    def _described(self, before: MembershipRecord) -> str:
        """Say what has happened, and how the batch is divided."""
        record, names = self.record, self.transport.site_names
        lost = [site for site in before.members if site not in record.members]
        reasons = [f"site {names[site]} is lost ({self._reason(site)})" for site in lost]
        shares = shares_of_members(len(names), record.members)
        computes = [
            f"{names[site]} computes the share{'s' * (len(own) > 1)} of "
            f"{' and '.join(names[share] for share in own)}"
            for site, own in enumerate(shares)
            if own
        ]
        return (
            f"{', '.join(reasons)}; the run goes on: {', '.join(computes)} "
            f"(membership {record.membership_id} in {self.place})"
        )

    def _reason(self, site: int) -> str:
        if site in self._silent:
            return self._reasons.get(site, f"silent for {self._lease:g} s")
        return self._reasons.get(site, "as another site has found")

    def _do(self, action: MembershipAction) -> None:
        match action:
            case SendTo(site, message):
                self._send(site, message)
            case ReadRecord():
                self._asked.read()
            case SwapRecord(expected, new):
                self._asked.swap(expected, new)
            case ComputeSums():
                self._computing = action
            case ApplySums():
                self._applying, self._computing = action, None
            case ReleaseSums(step):
                if self._kept is not None and self._kept[0] == step:
                    self._kept = None
            case StopActing(record):
                raise FencedError(
                    f"the run goes on without site {self.transport.site_names[self.transport.site]}"
                    f" ({self.place}: membership {record.membership_id}); end it at the other "
                    "sites, then start all sites again"
                )
            case WaitFor(reason):
                if reason != self._said:
                    assert self._state is not None, "the run has begun"
                    self._tell(self._state.applied + 1, f"waits: {reason}")
                self._said = reason
            case TakeState() | RestoreSave():
                raise AssertionError("a member's state is its own")

    def _send(self, site: int, message: MembershipMessage) -> None:
        assert self._state is not None, "the run has begun"
        if site not in self.transport.links:
            return
        match message:
            case Turn(_, _, applied, has_sums, asks):
                if has_sums and not asks and applied < self._state.last_step:
                    return  # the messages of the walk say so
            case HandedOver():
                self._hand_over(site, message)
        self.transport.note(site, as_note(message))

    def _hand_over(self, site: int, note: HandedOver) -> None:
        """Offer the sums of the last step to a site that lacks them."""
        assert not note.whole, "a member lacks one step at most"
        if (site, note.step) in self._handed_to:
            return
        self._handed_to.add((site, note.step))
        assert self._kept is not None, "sums are kept until all members have them"
        step, sums = self._kept
        assert step == note.step, "they are those of the last step"
        for number, message in enumerate(_messages(sums)):
            with contextlib.suppress(LostPeerError):
                self.transport.offer(site, _key(note, number), jax.tree.leaves(message))


def _messages(sums: StepSums) -> list[Any]:
    """Return the messages in which sums travel: one for each chunk, and the scalars."""
    return [*sums.totals, sums.scalars]


def _key(note: HandedOver, number: int) -> MessageKey:
    """Return the key of a message of sums that are handed over."""
    return MessageKey(note.step, "sums", chunk=number, membership_id=note.record.membership_id)
