"""Who takes part, as each process of a site knows it: what is decided comes in, and is done.

    first process     events → `geojax.membership.transition` → decisions   (`deciding_process`)
    other processes   decisions of the first one, and reports to it         (`following_process`)

What is decided comes to all processes of a site in the same order, whatever each of them sees. A
step that begins again is run to its sums first, with zeros for what has not come: devices wait for
each other in the programs of a site, so that all its processes have to run the same ones. A process
that hears of a step only when it begins again runs it too: another one may have begun it.
"""

import abc
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from geojax.errors import FencedError, RunError
from geojax.islands.actions import Shares, shares_of_members
from geojax.islands.going_on.decisions import (
    Adopt,
    Agreed,
    BeginAgain,
    ConnectMore,
    Decision,
    DropHanded,
    EndReturn,
    Fence,
    FetchHanded,
    HandOver,
    PartWith,
    TakeHanded,
    TakeUp,
)
from geojax.islands.going_on.handing_over import HandingOver, Incoming
from geojax.islands.programs.values import StepSums
from geojax.membership.events import ApplySums, ComputeSums, ReleaseSums, TakeState
from geojax.membership.record import MembershipRecord
from geojax.runtime.process_channel import ProcessChannel
from geojax.step.state import TrainState
from geojax.transport import CarrierTransport, LostPeerError
from geojax.transport.carrier import Peer
from geojax.transport.door import Door
from geojax.transport.endpoint import ProcessOfSite

POLL_SECONDS = 0.002

PeersOf: TypeAlias = Callable[[int, Sequence[ProcessOfSite]], Sequence[Peer]]
ConnectTo: TypeAlias = Callable[[Sequence[int]], object]


class InterruptedStepError(RunError):
    """The sites that take part have changed, so that the step begins again."""


class _Handed(NamedTuple):
    """Sums of a step that another site has handed over."""

    work: ApplySums
    sums: StepSums
    record: MembershipRecord


class _Coming(NamedTuple):
    """Sums or a state on their way."""

    number: int
    incoming: Incoming | None
    """None: the process at the other end is lost."""


class Surroundings(NamedTuple):
    """The ways of a process to the others of its site and to other sites."""

    transport: CarrierTransport
    """Joins the process to its counterparts in all other sites."""
    channel: ProcessChannel
    """Joins the processes of the site."""
    peers_of: PeersOf
    """Returns how the counterparts in a site are reached, by all its processes; it raises
    `UserError` if these do not fit."""
    connect_more: ConnectTo
    """Connects with sites, by their numbers, if they answer at their doors."""
    lease_seconds: float
    """A site that is silent for so long is evicted."""
    keeps_batch: bool
    """The sites that take part compute the shares of others."""


class SiteMembership(abc.ABC):
    """The membership of a site, in one of its processes; all call each method in the same order."""

    def __init__(self, around: Surroundings):
        self.transport, self._channel, self._around = around.transport, around.channel, around
        self.taking_part: frozenset[int] = frozenset(range(self.transport.sites))
        """Sites with which this one exchanges messages at this step of its own."""
        self.begun_at = 0
        """Steps in the state with which this site has begun to take part."""
        self.record: MembershipRecord
        """The record under which the last step is done; in all processes of the site the same."""
        self.handing = HandingOver(self.transport, tells=self._channel.own == 0)
        self._adopted: MembershipRecord
        self._has_begun = self._takes_part = False
        self._like: StepSums
        self._like_state: TrainState
        self._to_begin: deque[ComputeSums] = deque()
        """Steps that this process has not begun, in the order in which they were decided."""
        self._computing: ComputeSums | None = None
        """The newest step, unless it is applied or does not count any more."""
        self._at_work: ComputeSums | None = None
        self._ready: tuple[ComputeSums, StepSums] | None = None
        """A step of which all sums have come to this process, and which is not applied yet."""
        self._handed_over: dict[int, _Handed] = {}
        """Sums by their step."""
        self._coming: deque[_Coming] = deque()
        """Sums or a state that another site hands over, in the order of steps."""
        self._received: Any = None
        """The newest of them that all processes have."""
        self._works: deque[tuple[TakeState | ApplySums, Any]] = deque()
        """Work of a site that returns, with the state or the sums that it takes."""
        self._returns = False
        self._starts: dict[int, int] = {}
        """Number of the newest start of each site that has returned."""
        self._exchanges = 0
        self._agreed: dict[int, tuple[int, ...]] = {}

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
        self.record = self._adopted = record
        self._has_begun = self._takes_part = True

    def begin_return(self, sums: StepSums, state: TrainState, *, last_step: int) -> None:
        """Ask the sites that take part for their state, and follow them until `be_admitted`.

        Args:
            sums: the sums of a step, as `jax.ShapeDtypeStruct`s.
            state: what a site hands over of its state, as such.
            last_step: last step of the run.
        """
        self._like, self._like_state = sums, state
        self._has_begun = self._returns = True

    def followed_work(self) -> tuple[TakeState | ApplySums, Any] | None:
        """Return what a site that returns does next, with the state or the sums for it.

        None: nothing is here yet.

        Raises:
            RunError: a site that takes part is not reached, or all are lost.
        """
        self.poll()
        return self._works.popleft() if self._works else None

    def shares_of(self, record: MembershipRecord) -> Shares:
        """Return the shares of the batch that each site computes under a record."""
        return shares_of_members(
            self.transport.sites,
            record.members,
            holder=record.holder,
            keeps_batch=self._around.keeps_batch,
        )

    @abc.abstractmethod
    def be_admitted(self) -> None:
        """Ask to take part from now on."""

    def end_return(self) -> bool:
        """Compute as others do from now on, if this site is admitted and level; True if it is."""
        return not self._returns and not self._works

    @abc.abstractmethod
    def open_door(self, door: Callable[[], Door]) -> None:
        """Let sites that return come in at a door, which one process of the site opens."""

    @abc.abstractmethod
    def is_open(self) -> bool:
        """Return True while a site is silent or lost, and takes part as long as the record says."""

    def work_on(self, step: int) -> ComputeSums | ApplySums:
        """Wait for what is to be done of a step: compute sums, or take those of another site.

        Raises:
            FencedError: the run goes on without this site.
        """
        while True:
            self.poll()
            if self._to_begin and self._to_begin[0].step == step:
                work = self._to_begin.popleft()
                # A process alone in its site passes over a step that has begun again already.
                if work is self._computing or self._channel.others:
                    self.record, self.taking_part = work.record, frozenset(work.record.members)
                    return work
            elif (handed := self._handed_over.get(step)) is not None:
                self.record = handed.record
                # A site that was admitted meanwhile takes part from the next step on.
                self.taking_part &= frozenset(handed.record.members)
                return handed.work
            else:
                time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def at_work(self, work: ComputeSums) -> Iterator[Callable[[StepSums], None]]:
        """Let `is_interrupted` be true inside when the work begins again.

        Yields:
            The function that takes the sums of all sites, after which the step is applied; it
            raises `InterruptedStepError` if the step begins again.
        """
        self._at_work = work
        try:
            yield functools.partial(self._summed, work)
        finally:
            self._at_work = None

    @property
    def is_interrupted(self) -> bool:
        """True if the step that is under way begins again, so that nobody needs its messages."""
        return self._at_work is not None and self._computing is not self._at_work

    def _summed(self, work: ComputeSums, sums: StepSums) -> None:
        self.poll()
        if not self.is_interrupted:
            self._ready = work, sums
            self._tell_ready(work)
            while self._ready is not None and not self.is_interrupted:
                self.poll()
                if self._ready is not None:
                    time.sleep(POLL_SECONDS)
            if self._ready is None:
                self.handing.let_go()
                return
            self._ready = None
        raise InterruptedStepError("the step begins again")

    @abc.abstractmethod
    def _tell_ready(self, work: ComputeSums) -> None:
        """Note that the sums of a step have come to this process."""

    def handed(self, work: ApplySums) -> StepSums:
        """Return the sums of a step that another site has handed over."""
        self.handing.let_go()
        return self._handed_over.pop(work.step).sums

    def agreed(self, sites: Collection[int]) -> Collection[int]:
        """Return the sites of which each process of this one has a message, by what each has."""
        if not (self._has_begun and self._channel.others):
            return sites
        self._exchanges += 1
        self._answer(self._exchanges, tuple(sorted(sites)))
        while self._exchanges not in self._agreed:
            self.poll()
            time.sleep(POLL_SECONDS)
        return self._agreed.pop(self._exchanges)

    @abc.abstractmethod
    def _answer(self, number: int, sites: tuple[int, ...]) -> None:
        """Note the sites of which this process has a message of an exchange."""

    def poll(self) -> None:
        """Take in what has happened, and do what follows.

        Raises:
            FencedError: the run goes on without this site.
            RunError: it has neither begun nor returned, and a site is lost.
        """
        if not (self._takes_part or self._returns):
            self.transport.check()
        if self._has_begun:
            self._poll()

    @abc.abstractmethod
    def _poll(self) -> None:
        """Take in what has happened since this site has begun."""

    def close(self) -> None:
        """End the threads."""
        self._channel.close()

    def _do(self, decision: Decision) -> None:
        """Do what all processes of the site do."""
        match decision:
            case ComputeSums():
                self._to_begin.append(decision)
                self._computing = decision
            case ApplySums(source=None) if not self._returns:
                assert self._ready is not None, "all processes have the sums of all members"
                self.handing.keep(decision.step, self._ready[1])
                self._ready = self._computing = None
            case ApplySums() if not self._returns:
                handed = _Handed(decision, self._received, self._adopted)
                self._handed_over[decision.step] = handed
                self._computing = None
            case ApplySums() | TakeState():
                self._works.append((decision, self._received))
            case ReleaseSums(step):
                self.handing.release(step)
            case Adopt(record):
                self._adopted, self._takes_part = record, True
                self._computing = None
                self._coming.clear()
                if self._at_work is None:  # a step that begins again is run to its sums
                    self.taking_part &= frozenset(record.members)
                self.transport.withdraw(record.membership_id)
            case PartWith(site):
                if site in self.transport.links:
                    self.transport.give_up(site)
                    self.handing.forget(site)
            case TakeUp(site, start, processes):
                self._starts[site] = start
                self.transport.take_up(self._around.peers_of(site, processes))
            case HandOver(site, note, is_member):
                self.handing.hand_over(site, note, is_member=is_member)
            case FetchHanded(number, note):
                like = self._like_state if note.whole else self._like
                incoming = None
                with contextlib.suppress(LostPeerError):
                    incoming = Incoming(self.transport, note, like)
                self._coming.append(_Coming(number, incoming))
            case TakeHanded(keeps):
                _, incoming = self._coming.popleft()
                assert incoming is not None, "it has come to all processes"
                self._received = incoming.result()
                if keeps:
                    self.handing.keep(incoming.note.step, self._received)
            case DropHanded():
                self._coming.clear()
            case BeginAgain():
                self._works.clear()
            case ConnectMore(sites):
                self._around.connect_more(sites)
            case EndReturn(applied):
                self._returns, self.begun_at = False, applied
            case Agreed(number, sites):
                self._agreed[number] = sites
            case Fence(reason):
                raise FencedError(reason)

    def _has_come(self) -> Iterator[int]:
        """Yield the numbers of what has come to this process, as far as nothing before is missing.

        Nothing but what another site hands over counts.
        """
        for number, incoming in self._coming:
            if incoming is None or not incoming.arrived():
                return
            yield number
