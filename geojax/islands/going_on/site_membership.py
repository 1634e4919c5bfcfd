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
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from geojax.errors import FencedError, RunError, UserError
from geojax.islands.actions import shares_of_members
from geojax.islands.going_on.asked_store import AskedStore
from geojax.islands.going_on.handing_over import HandingOver, Incoming
from geojax.islands.going_on.ticks import Ticks
from geojax.islands.programs.values import StepSums
from geojax.membership.events import (
    ApplySums,
    ComputeSums,
    Elapsed,
    Gone,
    HandedOver,
    Heard,
    JoinRequest,
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
from geojax.membership.member_state import MOST_QUEUED_STEPS, MemberState
from geojax.membership.notes import as_note, message_of
from geojax.membership.record import MembershipRecord, RecordStore
from geojax.membership.transition import member, returned, transition
from geojax.runtime.rendezvous import Presence
from geojax.step.state import TrainState
from geojax.transport import CarrierTransport, LostPeerError
from geojax.transport.carrier import Peer
from geojax.transport.door import Door
from geojax.transport.handshake import Party
from geojax.transport.host_memory import size_of
from geojax.transport.peer_link import PeerLink
from geojax.transport.shards import local_shapes

_POLL_SECONDS = 0.002
_QUEUE_SHARE = 0.25
"""Part of the free host memory that may hold sums for a site that returns."""


class InterruptedStepError(RunError):
    """The sites that take part have changed, so that the step begins again."""


class SiteMembership:
    """The membership of one site.

    Args:
        transport: joins the site to all others.
        store: has the record.
        place: name of the store, as lines of the log show it.
        lease_seconds: a site that is silent for so long is evicted.
        join_pause_seconds: longest pause for a returned site that does not catch up.
        tell: shows an event at a step to the user.
        peer_of: returns how a process of another site is reached, or raises `UserError`.
    """

    def __init__(
        self,
        transport: CarrierTransport,
        store: RecordStore,
        place: str,
        lease_seconds: float,
        join_pause_seconds: float,
        tell: Callable[[Literal["lost", "back"], int, str], None],
        peer_of: Callable[[int, Presence], Peer],
    ):
        self.transport = transport
        self.store, self._asked = store, AskedStore(store, lease_seconds / 3)
        self.place, self._lease, self._tell = place, lease_seconds, tell
        self._peer_of, self._join_pause = peer_of, join_pause_seconds
        self.handing = HandingOver(transport)
        self.taking_part: frozenset[int] = frozenset(range(transport.sites))
        """Sites with which this one exchanges messages at this step of its own."""
        self._door: Door | None = None
        self._problem: str | None = None
        """The problem of the door that was told last."""
        self._guests: dict[int, Peer] = {}
        """Starts of other sites' processes that are taken up when the record lacks these sites."""
        self._state: MemberState | None = None
        self._ticks = Ticks()
        self._computing: ComputeSums | None = None
        self._applying: ApplySums | None = None
        self._at_work: ComputeSums | None = None
        self._like: StepSums
        self._like_state: TrainState
        self.begun_at = 0
        """Steps in the state with which this site has begun to take part."""
        self._taken_up: dict[int, Party] = {}
        """Starts of sites that have returned."""
        self._ahead: list[Turn] = []
        """Turns of sites that have applied the step of which this one still takes the sums."""
        self._coming: deque[Incoming] = deque()
        """Sums or a state that another site hands over, in the order of steps."""
        self._received: Any = None
        """The newest that has come."""
        self._works: deque[tuple[TakeState | ApplySums, Any]] = deque()
        """Work of a site that returns, with the state or the sums that it takes."""
        self._returns = self._is_ready = False
        """This site returns; it is ready to compute, so that it may be admitted."""
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
        self._like, self.begun_at = sums, saved
        self._ticks.take()
        site, sites = self.transport.site, self.transport.sites
        settings = self._settings(sums, last_step)
        self._state, actions = member(site, sites, record, saved=saved, **settings)
        for action in actions:
            self._do(action)

    def begin_return(self, sums: StepSums, state: TrainState, *, last_step: int) -> None:
        """Ask the sites that take part for their state, and follow them until `be_admitted`.

        Args:
            sums: the sums of a step, as `jax.ShapeDtypeStruct`s.
            state: what a site hands over of its state, as such.
            last_step: last step of the run.
        """
        self._like, self._like_state, self._returns = sums, state, True
        self._ticks.take()
        site, sites = self.transport.site, self.transport.sites
        settings = self._settings(sums, last_step)
        self._state, actions = returned(site, sites, saved=0, **settings)
        for action in actions:
            self._do(action)

    def _settings(self, sums: StepSums, last_step: int) -> dict[str, Any]:
        """Return what the transition function is told of the run."""
        return {
            "last_step": last_step,
            "lease": self._lease,
            "most_queued": _most_queued(sums),
            "join_pause": self._join_pause,
        }

    def followed_work(self) -> tuple[TakeState | ApplySums, Any] | None:
        """Return what a site that returns does next, with the state or the sums for it.

        None: nothing is here yet.

        Raises:
            RunError: a site that takes part is lost, or does not answer at its door.
        """
        self.poll()
        self._require_all_members()
        if all(link.control.finished for link in self.transport.links.values()):
            raise RunError("the other sites have ended the run; this one has come too late")
        return self._works.popleft() if self._works else None

    def _require_all_members(self) -> None:
        """Check that this site, which returns, reaches all that take part: each waits for it then.

        Raises:
            RunError: it does not reach one.
        """
        assert self._state is not None, "the site returns"
        members = () if self._state.record is None else self._state.record.members
        unreached = set(members) - {self.transport.site, *self.transport.links}
        if unreached:
            names = " and ".join(self.transport.site_names[site] for site in sorted(unreached))
            raise RunError(
                f"site {names} takes part in the run, and does not answer at its door; start this "
                "site again"
            )

    def be_admitted(self) -> None:
        """Ask to take part from now on."""
        self._is_ready = True

    def end_return(self) -> bool:
        """Compute as others do from now on, if this site is admitted and level; True if it is."""
        state = self._state
        assert state is not None, "the site returns"
        if not state.takes_part or state.joining or self._works:
            return False
        self._returns, self.begun_at = False, state.applied
        return True

    def open_door(self, door: Door) -> None:
        """Let sites that return come in."""
        self._door = door

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
                self.taking_part = frozenset(self._computing.record.members)
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
        self.handing.keep(work.step, sums)
        self._take(SumsReady(record.membership_id, work.step))
        assert self._applying == ApplySums(work.step, record.membership_id, source=None), (
            "sums of all members are applied"
        )
        ahead, self._ahead = self._ahead, []
        for turn in ahead:
            self._take(Received(turn))
        self.handing.let_go()

    def handed(self, work: ApplySums) -> StepSums:
        """Return the sums of a step that another site has handed over."""
        sums, self._received = self._received, None
        assert sums is not None, f"the sums of step {work.step} are here"
        self.handing.let_go()
        made: StepSums = sums
        return made

    def poll(self) -> None:
        """Take in what has happened, and do what follows.

        Raises:
            FencedError: the run goes on without this site.
            RunError: it has not begun, and a site is lost.
        """
        if self._state is None or not self._state.takes_part:
            self.transport.check()
        if self._state is None:
            return
        for seconds in self._ticks.take():
            self._take(Elapsed(seconds))
        self._admit_guests()
        for site, link in list(self.transport.links.items()):
            if (event := self._noticed(site, link)) is not None:
                self._take(event)
        with contextlib.suppress(queue.Empty):
            while True:
                self._read(*self.transport.notes.get_nowait())
        while self._coming and self._coming[0].arrived():
            incoming = self._coming.popleft()
            self._received = incoming.result()
            if self._state.takes_part and not incoming.note.whole:
                self.handing.keep(incoming.note.step, self._received)
            self._take(Received(incoming.note))
        while (answer := self._asked.answer()) is not None:
            self._take(answer)

    def close(self) -> None:
        """End the threads."""
        if self._door is not None:
            self._door.close()
        self._ticks.close()
        self._asked.close()

    def _noticed(self, site: int, link: PeerLink) -> MembershipEvent | None:
        """Return what a link tells of a site that it has not told before."""
        assert self._state is not None, "the run has begun"
        control = link.control
        if self._state.takes_part and site not in self.record.members:
            is_silent = control.silent_seconds >= self._lease * 2 / 3
            if not (control.finished or control.lost or link.lost or is_silent):
                return None
            self._part(site)
            return Gone(site)
        if control.finished or site in self._reasons or not self._state.takes_part:
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
                self._fetch(message)
            case _:
                self._take(Received(message))

    def _fetch(self, note: HandedOver) -> None:
        """Fetch what another site hands over, before this one counts as told of it."""
        state = self._state
        assert state is not None, "the run has begun"
        if note.record != state.record:
            return
        newest = self._coming[-1].note.step if self._coming else state.applied
        if note.whole:
            if (state.takes_part and not state.joining) or note.step <= newest:
                return
            self._coming.clear()  # the others have gone on too far
        elif note.step != newest + 1:
            return
        with contextlib.suppress(LostPeerError):  # another member has the sums too, or none has
            like = self._like_state if note.whole else self._like
            self._coming.append(Incoming(self.transport, note, like))

    def _admit_guests(self) -> None:
        """Take up the processes of sites that have come to the door, if the record lacks these."""
        if self._door is None:
            return
        if self._door.problem not in (None, self._problem):
            self._problem = self._door.problem
            assert self._state is not None, "the run has begun"
            text = f"a lost site may not come in here: {self._problem}"
            self._tell("lost", self._state.applied + 1, text)
        with contextlib.suppress(queue.Empty):
            while True:
                self._welcome(self._door.arrivals.get_nowait())
        for site, peer in list(self._guests.items()):
            if site in self.record.members:
                if site not in self._reasons:
                    self._reasons[site] = "its process has started again"
                    self._take(Gone(site))
                continue
            del self._guests[site]
            if site in self.transport.links:
                self._part(site)
                self._take(Gone(site))
            self._reasons.pop(site, None)
            self._silent.discard(site)
            self._taken_up[site] = peer.party
            self.transport.take_up(peer)

    def _part(self, site: int) -> None:
        """Let go of a site that does not take part."""
        self.transport.give_up(site)
        self.handing.forget(site)

    def _welcome(self, presence: Presence) -> None:
        names = list(self.transport.site_names)
        if presence.site not in names or presence.site == names[self.transport.site]:
            return
        site = names.index(presence.site)
        assert self._state is not None, "the run has begun"
        try:
            peer = self._peer_of(site, presence)
        except UserError as error:
            reason = f"site {presence.site} cannot return: {error}"
            self._tell("lost", self._state.applied + 1, reason)
            return
        if peer.party != self._taken_up.get(site):  # its answer was lost, and it asked again
            self._guests[site] = peer

    def _take(self, event: MembershipEvent) -> None:
        assert self._state is not None, "the run has begun"
        before = self._state.record
        self._state, actions = transition(self._state, event)
        if self._state.takes_part and self._state.record != before:
            assert before is not None, "a member has a record"
            self._adopt(before)
        elif self._state.record != before:
            self._coming.clear()
        for action in actions:
            self._do(action)

    def _adopt(self, before: MembershipRecord) -> None:
        """Let go of the sites that take part no more, and of the work under the record before."""
        record = self.record
        self._computing = None
        self._coming.clear()
        self._ahead.clear()
        self.taking_part &= frozenset(record.members)
        for site in set(before.members) - set(record.members):
            if site in self.transport.links:
                self._part(site)
        self.transport.withdraw(record.membership_id)
        assert self._state is not None, "the run has begun"
        is_loss = set(before.members) - set(record.members)
        self._tell("lost" if is_loss else "back", self._state.applied + 1, self._described(before))

    def _described(self, before: MembershipRecord) -> str:
        """Say what has happened, and how the batch is divided."""
        record, names = self.record, self.transport.site_names
        lost = [site for site in before.members if site not in record.members]
        back = [site for site in record.members if site not in before.members]
        reasons = [f"site {names[site]} is lost ({self._reason(site)})" for site in lost]
        reasons += [f"site {names[site]} is back" for site in back]
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
            case ApplySums() if not self._returns:
                self._applying, self._computing = action, None
            case ApplySums() | TakeState():
                self._works.append((action, self._received))
            case ReleaseSums(step):
                self.handing.release(step)
            case StopActing(record):
                raise FencedError(
                    f"the run goes on without site {self.transport.site_names[self.transport.site]}"
                    f" ({self.place}: membership {record.membership_id}); start this site again, "
                    "and it returns"
                )
            case WaitFor(reason):
                if reason != self._said:
                    assert self._state is not None, "the run has begun"
                    self._tell("lost", self._state.applied + 1, f"waits: {reason}")
                self._said = reason
            case RestoreSave():
                raise AssertionError("a site that was fenced ends")

    def _send(self, site: int, message: MembershipMessage) -> None:
        assert self._state is not None, "the run has begun"
        if site not in self.transport.links:
            return
        match message:
            case Turn(_, _, applied, has_sums, asks):
                if has_sums and not asks and applied < self._state.last_step:
                    return  # the messages of the walk say so
            case HandedOver():
                is_member = site in self.record.members
                self.handing.hand_over(site, message, is_member=is_member)
                return
            case JoinRequest(follows=True) if not self._is_ready:
                return
        self.transport.note(site, as_note(message))


def _most_queued(sums: StepSums) -> int:
    """Return for how many steps this process has room to hold sums for a site that returns."""
    shards = [shape for leaf in jax.tree.leaves(sums) for shape in local_shapes(leaf)]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = _QUEUE_SHARE * free
    return max(1, min(MOST_QUEUED_STEPS, int(room // size_of(shards))))
