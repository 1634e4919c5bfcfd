"""The first process of a site decides for the whole site: events come in, decisions go out.

    links, notes of other sites, reports of the site's processes, the clock, the store
        → events → `geojax.membership.transition` → actions
    actions: notes to other sites, requests to the store, and decisions, which all processes do

Everything but the wait for the store happens in the main thread, wherever it waits for other sites.

Sums of a step that come in the walk's messages are the turn of their sender: it has applied the
step before. Turns travel as notes after a change of the record alone.
"""

import contextlib
import os
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from geojax.errors import RunError, UserError
from geojax.islands.going_on.asked_store import AskedStore
from geojax.islands.going_on.decisions import (
    Adopt,
    Agreed,
    Answered,
    BeginAgain,
    ConnectMore,
    Decision,
    DropHanded,
    EndReturn,
    Fence,
    FetchHanded,
    HandedCame,
    HandOver,
    PartWith,
    SeenLink,
    TakeHanded,
    TakeUp,
    as_text,
    report_of,
)
from geojax.islands.going_on.handing_over import bytes_in_process
from geojax.islands.going_on.site_membership import SiteMembership, Surroundings
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
from geojax.membership.member_state import MOST_QUEUED_STEPS, SILENT_SHARE, MemberState
from geojax.membership.notes import as_note, message_of
from geojax.membership.record import MembershipRecord, RecordStore
from geojax.membership.transition import member, returned, transition
from geojax.runtime.rendezvous import Presence
from geojax.step.state import TrainState
from geojax.transport import LostPeerError
from geojax.transport.door import Door
from geojax.transport.endpoint import ProcessOfSite, processes_of
from geojax.transport.handshake import Party
from geojax.transport.link_to_site import LinkToSite

_QUEUE_SHARE = 0.25
"""Part of the free host memory that may hold sums for a site that returns."""
UNREACHED_LEASES = 3.0
"""Eviction times for which a site that returns waits for one that takes part and is not reached."""
_CONNECT_SECONDS = 1.0


class DecidingProcess(SiteMembership):
    """The membership of a site, in its first process.

    Args:
        around: what the process has around it.
        store: has the record.
        place: name of the store, as lines of the log show it.
        join_pause_seconds: longest pause for a returned site that does not catch up.
        tell: shows an event at a step to the user.
    """

    def __init__(
        self,
        around: Surroundings,
        store: RecordStore,
        place: str,
        join_pause_seconds: float,
        tell: Callable[[Literal["lost", "back"], int, str], None],
    ):
        super().__init__(around)
        self._place, self._lease, self._tell = place, around.lease_seconds, tell
        self._asked = AskedStore(store, self._lease / 3)
        self._join_pause = join_pause_seconds
        self._door: Door | None = None
        self._problem: str | None = None
        """The problem of the door that was told last."""
        self._guests: dict[int, tuple[ProcessOfSite, ...]] = {}
        """Starts of other sites' processes that are taken up when the record lacks these sites."""
        self._state: MemberState
        self._ticks = Ticks()
        self._taken_up: dict[int, Party] = {}
        """Starts of sites that have returned."""
        self._ahead: list[Turn] = []
        """Turns of sites that have applied the step of which this one still takes the sums."""
        self._fetched = 0
        """Number of the newest that another site hands over."""
        self._is_ready = False
        """This site, which returns, is ready to compute, so that it may be admitted."""
        self._lost_on_return: set[int] = set()
        """Sites that this one, which returns, has lost under the newest record."""
        self._reaches_all_at = 0.0
        """Time at which this site, which returns, reached all that take part, or began to."""
        self._connected_at = 0.0
        """Time at which it asked at their doors last."""
        self._reasons: dict[int, str] = {}
        """Reason why a site is lost."""
        self._silent: set[int] = set()
        """Sites that this one does not hear."""
        self._said: str | None = None
        self._seen: dict[tuple[int, int], SeenLink] = {}
        """As another process of this site, the second of the key, sees a site."""
        self._reports: dict[SumsReady | HandedCame, set[int]] = {}
        """The other processes of which each has come."""
        self._answers: dict[int, dict[int, tuple[int, ...]]] = {}
        """Answers of all processes to an exchange, by its number."""

    def begin(
        self, record: MembershipRecord, sums: StepSums, *, saved: int, last_step: int
    ) -> None:
        """Take part from now on."""
        super().begin(record, sums, saved=saved, last_step=last_step)
        site, sites = self.transport.site, self.transport.sites
        self._begin(member(site, sites, record, saved=saved, **self._settings(sums, last_step)))

    def begin_return(self, sums: StepSums, state: TrainState, *, last_step: int) -> None:
        """Ask the sites that take part for their state, and follow them until `be_admitted`."""
        super().begin_return(sums, state, last_step=last_step)
        self._reaches_all_at = time.monotonic()
        site, sites = self.transport.site, self.transport.sites
        self._begin(returned(site, sites, saved=0, **self._settings(sums, last_step)))

    def _begin(self, first: tuple[MemberState, Sequence[MembershipAction]]) -> None:
        """Begin with a state of the transition function, and do its first actions."""
        self._ticks.take()
        self._state, actions = first
        for action in actions:
            self._act(action)

    def _settings(self, sums: StepSums, last_step: int) -> dict[str, Any]:
        """Return what the transition function is told of the run."""
        return {
            "last_step": last_step,
            "lease": self._lease,
            "most_queued": _most_queued(sums),
            "join_pause": self._join_pause,
        }

    def followed_work(self) -> tuple[TakeState | ApplySums, Any] | None:
        """Return what a site that returns does next, with the state or the sums for it."""
        work = super().followed_work()
        self._reach_all_members()
        links = self.transport.links.values()
        if not links:
            raise RunError("all sites that took part are lost; start this site again")
        if all(link.finished for link in links):
            raise RunError("the other sites have ended the run; this one has come too late")
        return work

    @property
    def _unreached(self) -> set[int]:
        """Sites that take part, and that this one, which returns, does not reach."""
        members = () if self._state.record is None else self._state.record.members
        return set(members) - {self.transport.site, *self.transport.links}

    def _reach_all_members(self) -> None:
        """Let this site, which returns, reach all that take part: each waits for it then.

        One that is lost is waited for until the others have taken it out of the record.

        Raises:
            RunError: it does not reach one for too long.
        """
        now, unreached = time.monotonic(), self._unreached
        if not unreached:
            self._reaches_all_at = now
        elif now > self._reaches_all_at + UNREACHED_LEASES * self._lease:
            names = " and ".join(self.transport.site_names[site] for site in sorted(unreached))
            raise RunError(
                f"site {names} takes part in the run, and does not answer at its door; start this "
                "site again"
            )
        elif now > self._connected_at + _CONNECT_SECONDS:
            if new := unreached - self._lost_on_return:
                self._decide(ConnectMore(tuple(sorted(new))))
            self._connected_at = time.monotonic()

    def be_admitted(self) -> None:
        """Ask to take part from now on."""
        self._is_ready = True

    def end_return(self) -> bool:
        """Compute as others do from now on, if this site is admitted and level; True if it is."""
        state = self._state
        if self._returns and state.takes_part and not (state.joining or self._works):
            self._decide(EndReturn(state.applied))
        return super().end_return()

    def open_door(self, door: Callable[[], Door]) -> None:
        """Let sites that return come in at a door."""
        self._door = door()

    def is_open(self) -> bool:
        """Return True while a site is silent or lost, and takes part as long as the record says."""
        return self._takes_part and max(self._state.silence) >= 0

    def close(self) -> None:
        """End the threads."""
        super().close()
        if self._door is not None:
            self._door.close()
        self._ticks.close()
        self._asked.close()

    def _poll(self) -> None:
        for seconds in self._ticks.take():
            self._take(Elapsed(seconds))
        self._admit_guests()
        for process, text in self._channel.received():
            self._note_report(process, text)
        for site, link in list(self.transport.links.items()):
            if (event := self._noticed(site, link)) is not None:
                self._take(event)
        with contextlib.suppress(queue.Empty):
            while True:
                self._read(*self.transport.notes.get_nowait())
        self._take_handed()
        while (answer := self._asked.answer()) is not None:
            self._take(answer)
        self._apply_if_ready()

    def _note_report(self, process: int, text: str) -> None:
        match report := report_of(text):
            case SeenLink(site, start):
                if start == self._starts.get(site, 0):
                    self._seen[site, process] = report
            case Answered(number, sites):
                self._agree(number, process, sites)
            case SumsReady() | HandedCame():
                self._reports.setdefault(report, set()).add(process)

    def _is_everywhere(self, report: SumsReady | HandedCame) -> bool:
        """Return True if all other processes of this site have reported something."""
        return len(self._reports.get(report, ())) == len(self._channel.others)

    def _tell_ready(self, work: ComputeSums) -> None:
        """Leave it to the next look, which finds the sums."""

    def _answer(self, number: int, sites: tuple[int, ...]) -> None:
        self._agree(number, self._channel.own, sites)

    def _agree(self, number: int, process: int, sites: tuple[int, ...]) -> None:
        answers = self._answers.setdefault(number, {})
        answers[process] = sites
        if len(answers) == 1 + len(self._channel.others):
            del self._answers[number]
            of_all = frozenset.intersection(*map(frozenset, answers.values()))
            self._decide(Agreed(number, tuple(sorted(of_all))))

    def _take_handed(self) -> None:
        """Take what has come to all processes of what other sites hand over.

        Taken sums count as applied: a site that returns does the work of one before the next.
        """
        while not self._works and (number := next(self._has_come(), None)):
            if not self._is_everywhere(HandedCame(number)):
                return
            self._reports.pop(HandedCame(number), None)
            incoming = self._coming[0].incoming
            assert incoming is not None, "it has come"
            self._decide(TakeHanded(self._state.takes_part and not incoming.note.whole))
            self._take(Received(incoming.note))

    def _apply_if_ready(self) -> None:
        """Apply a step if all processes have the sums of all members."""
        if self._ready is None or self.is_interrupted:
            return
        work, _ = self._ready
        ready = SumsReady(work.record.membership_id, work.step)
        if not self._is_everywhere(ready):
            return
        self._reports.pop(ready, None)
        for site in work.record.members:
            if site != self.transport.site:
                turn = Turn(site, work.record, work.step - 1, has_sums=True)
                self._take(Received(turn))
        self._take(ready)
        assert self._ready is None, "sums of all members are applied"
        ahead, self._ahead = self._ahead, []
        for turn in ahead:
            self._take(Received(turn))

    def _noticed(self, site: int, link: LinkToSite) -> MembershipEvent | None:
        """Return what a link tells of a site that it has not told before."""
        seen = [each for (of, _), each in self._seen.items() if of == site]
        is_silent = link.silent_seconds >= SILENT_SHARE * self._lease
        is_silent |= any(each.is_silent for each in seen)
        lost = next((each.lost for each in seen if each.lost is not None), link.lost_contact)
        if self._takes_part and site not in self._adopted.members:
            if not (link.finished or lost or link.is_lost or is_silent):
                return None
            self._part(site)
            return Gone(site)
        if self._returns and not self._takes_part and (lost or link.is_lost):
            self._lost_on_return.add(site)
            self._part(site)
            return Gone(site)
        if link.finished or site in self._reasons or not self._takes_part:
            return None
        try:
            link.check()
        except LostPeerError:
            if link.lost_contact is None:  # it could not be sent a message, or take one
                raise
        if lost is not None:
            self._reasons[site] = lost
            return Gone(site)
        if is_silent == (self._state.silence[site] >= 0):
            return None
        if is_silent:
            self._silent.add(site)
            return Silent(site)
        self._silent.discard(site)
        return Heard(site)

    def _read(self, site: int, note: bytes) -> None:
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
        if note.record != state.record:
            return
        newest = state.applied
        if self._coming and (incoming := self._coming[-1].incoming) is not None:
            newest = incoming.note.step
        if note.whole:
            if (state.takes_part and not state.joining) or note.step <= newest:
                return
            self._decide(DropHanded())  # the others have gone on too far
        elif note.step != newest + 1:
            return
        link = self.transport.links.get(note.sender)
        if link is None or link.is_lost or link.lost_contact:
            return  # another member has the sums too, or none has
        self._fetched += 1
        self._decide(FetchHanded(self._fetched, note))

    def _admit_guests(self) -> None:
        """Take up the processes of sites that have come to the door, if the record lacks these."""
        if self._door is None:
            return
        if self._door.problem not in (None, self._problem):
            self._problem = self._door.problem
            text = f"a lost site may not come in here: {self._problem}"
            self._tell("lost", self._state.applied + 1, text)
        with contextlib.suppress(queue.Empty):
            while True:
                self._welcome(self._door.arrivals.get_nowait())
        for site, guests in list(self._guests.items()):
            if site in self._adopted.members:
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
            self._taken_up[site] = self._around.peers_of(site, guests)[0].party
            self._forget_seen(site)
            self._decide(TakeUp(site, self._starts.get(site, 0) + 1, guests))

    def _part(self, site: int) -> None:
        """Let go of a site that does not take part."""
        self._forget_seen(site)
        self._decide(PartWith(site))

    def _forget_seen(self, site: int) -> None:
        for process in self._channel.others:
            self._seen.pop((site, process), None)

    def _welcome(self, first: Presence) -> None:
        names = list(self.transport.site_names)
        name = first.site
        if name not in names or name == names[self.transport.site]:
            return
        site = names.index(name)
        try:
            guests = processes_of(first.endpoint, f"site {name}")
            peer, *_ = self._around.peers_of(site, guests)
        except UserError as error:
            reason = f"site {name} cannot return: {error}"
            self._tell("lost", self._state.applied + 1, reason)
            return
        if peer.party != self._taken_up.get(site):  # its answer was lost, and it asked again
            self._guests[site] = guests

    def _take(self, event: MembershipEvent) -> None:
        before = self._state.record
        self._state, actions = transition(self._state, event)
        if self._state.record != before:
            if self._state.takes_part:
                assert before is not None, "a member has a record"
                self._adopt(before)
            else:
                self._lost_on_return.clear()
                self._decide(DropHanded())
        for action in actions:
            self._act(action)

    def _adopt(self, before: MembershipRecord) -> None:
        """Let go of the sites that take part no more, and of the work under the record before."""
        record = self._state.record
        assert record is not None, "a site that takes part has a record"
        self._ahead.clear()
        self._reports.clear()
        self._decide(Adopt(record))
        lost = sorted(set(before.members) - set(record.members))
        for site in lost:
            self._part(site)
        self._tell("lost" if lost else "back", self._state.applied + 1, self._described(before))

    def _described(self, before: MembershipRecord) -> str:
        """Say what has happened, and how the batch is divided."""
        record, names = self._adopted, self.transport.site_names
        lost = [site for site in before.members if site not in record.members]
        back = [site for site in record.members if site not in before.members]
        reasons = [f"site {names[site]} is lost ({self._reason(site)})" for site in lost]
        reasons += [f"site {names[site]} is back" for site in back]
        shares = self.shares_of(record)
        computes = [
            f"{names[site]} computes the share{'s' * (len(own) > 1)} of "
            f"{' and '.join(names[share] for share in own)}"
            for site, own in enumerate(shares)
            if own
        ]
        if left_out := set(range(len(names))) - {share for own in shares for share in own}:
            words = " and ".join(names[share] for share in sorted(left_out))
            computes.append(f"nobody computes the share{'s' * (len(left_out) > 1)} of {words}")
        return (
            f"{', '.join(reasons)}; the run goes on: {', '.join(computes)} "
            f"(membership {record.membership_id} in {self._place})"
        )

    def _reason(self, site: int) -> str:
        if site in self._silent:
            return self._reasons.get(site, f"silent for {self._lease:g} s")
        return self._reasons.get(site, "as another site has found")

    def _act(self, action: MembershipAction) -> None:
        """Do what the transition function says."""
        match action:
            case SendTo(site, message):
                self._send(site, message)
            case ReadRecord():
                self._asked.read()
            case SwapRecord(expected, new):
                self._asked.swap(expected, new)
            case ComputeSums() | ApplySums() | TakeState() | ReleaseSums():
                self._decide(action)
            case StopActing(record):
                self._decide(
                    Fence(
                        "the run goes on without site "
                        f"{self.transport.site_names[self.transport.site]} ({self._place}: "
                        f"membership {record.membership_id}); start this site again, and it returns"
                    )
                )
            case WaitFor(reason):
                if reason != self._said:
                    self._tell("lost", self._state.applied + 1, f"waits: {reason}")
                self._said = reason
            case RestoreSave():
                assert self._returns, "a site that was fenced ends"
                self._decide(BeginAgain())

    def _decide(self, decision: Decision) -> None:
        """Let all processes of this site do something, this one too."""
        if self._channel.others:
            self._channel.send(as_text(decision))
        self._do(decision)

    def _send(self, site: int, message: MembershipMessage) -> None:
        if site not in self.transport.links:
            return
        match message:
            case Turn(_, _, applied, has_sums, asks):
                if has_sums and not asks and applied < self._state.last_step:
                    return  # the messages of the walk say so
            case HandedOver():
                self._decide(HandOver(site, message, site in self._adopted.members))
                return
            case JoinRequest(follows=True) if not self._is_ready or self._unreached:
                return
        self.transport.note(site, as_note(message))


def _most_queued(sums: StepSums) -> int:
    """Return for how many steps this process has room to hold sums for a site that returns."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = _QUEUE_SHARE * free
    return max(1, min(MOST_QUEUED_STEPS, int(room // bytes_in_process(sums))))
