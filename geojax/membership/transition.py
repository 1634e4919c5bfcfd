"""Who takes part in a run of islands, in role data: one function of a site's state and an event.

`transition(state, event)` returns the next state and what to do now. It has no thread, clock or
socket: time comes in as durations by the site's own monotonic clock.

The first process of a site, the lowest of its ranks, calls it; the site's other processes never do.
It sends every `ComputeSums`, `ApplySums`, `TakeState`, `RestoreSave` and `CommitStep` to them over
the site's control connection, and all do it at the boundary of that step, in the same order. It
gives `SumsReady` when all of them have their shards of the sums. A site that loses one process is
lost whole.

The caller does the actions of one call in their order, before it gives the next event:

    SendTo               send the message; sums and states travel beside it as arrays
    ReadRecord, SwapRecord
                         ask the store in a thread; the answer is the event RecordSeen, or
                         StoreUnreachable after a time-out. One request is under way at a time
    ComputeSums          compute the site's shares of the batch under the record's members
    ApplySums, TakeState, RestoreSave
                         change the state on the devices, and keep the sums of ApplySums
    CommitStep           the step counts: complete what all sites share of it (the holder alone
                         publishes); give Elapsed before, after any suspension. Sites that share
                         nothing do nothing: the membership_id says whose save is newer
    ReleaseSums          drop the sums of a step
    StopActing, WaitFor  print a line

All time-outs are parts of one time T, `MemberState.lease`:

    2T/3 of silence      `Silent`: the site stops acting, unless it is the holder
    T of silence         the holder evicts; another member begins to watch the record, and tells the
                         holder (`Unheard`), which lets one of the two leave (`Leave`)
    2T/3 after `Silent`  the holder stops acting if it has not changed the record by then
    T of watching        the member that watched evicts, if the record is still the same

A member whose process has ended (`Gone`) is evicted at once, the holder by another member.
A returned site is admitted at the end of a step, and decides nothing before it is level. Until then
it follows: `geojax.membership.following` says how. The holder's caller keeps for it, by the state:

    queued_from          copies of the sums of the steps from here to the last one; 0: none
    handed               the state after this step, until the follower has it; 0: none

While all members hear each other, nothing of this needs the store. `docs/membership.md` says more.
"""

import math

from geojax.membership.events import (
    ApplySums,
    CommitStep,
    ComputeSums,
    Elapsed,
    Gone,
    HandedOver,
    Heard,
    JoinRequest,
    Leave,
    MembershipAction,
    MembershipEvent,
    MembershipMessage,
    ReadRecord,
    Received,
    RecordSeen,
    Refusal,
    ReleaseSums,
    RestoreSave,
    SendTo,
    Silent,
    StopActing,
    StoreUnreachable,
    SumsReady,
    SwapRecord,
    TakeState,
    Turn,
    Unheard,
    WaitFor,
)
from geojax.membership.following import begun_again, lags, overflows, served, without_follower
from geojax.membership.member_state import (
    HALF_HEARD,
    JOIN_PAUSE_SECONDS,
    MOST_QUEUED_STEPS,
    UNKNOWN,
    MemberState,
    members_of,
    replaced,
)
from geojax.membership.membership_rules import RULES, MembershipRules
from geojax.membership.record import MembershipRecord


def member(
    site: int,
    sites: int,
    record: MembershipRecord,
    *,
    last_step: int,
    lease: float,
    saved: int = 0,
    most_queued: int = MOST_QUEUED_STEPS,
    join_pause: float = JOIN_PAUSE_SECONDS,
) -> tuple[MemberState, tuple[MembershipAction, ...]]:
    """Return a site's state and first actions at the start of a run at which all members have met.

    Args:
        site: this site.
        sites: number of sites that may take part.
        record: the record that the first start has created.
        last_step: last step of the run.
        lease: T, in seconds.
        saved: step of the state, the same at all sites.
        most_queued: most steps whose sums are held for a returned site, besides the last one.
        join_pause: longest pause for a returned site that does not become level, in seconds.
    """
    state, _ = returned(
        site,
        sites,
        last_step=last_step,
        lease=lease,
        saved=saved,
        most_queued=most_queued,
        join_pause=join_pause,
    )
    levels = tuple(saved if site in record.members else UNKNOWN for site in range(sites))
    state = state._replace(
        record=record,
        takes_part=True,
        acted_under=record.membership_id,
        levels=levels,
        computing=True,
        store_asked=False,
    )
    return state, (ComputeSums(record, saved + 1),)


def returned(
    site: int,
    sites: int,
    *,
    last_step: int,
    lease: float,
    saved: int,
    most_queued: int = MOST_QUEUED_STEPS,
    join_pause: float = JOIN_PAUSE_SECONDS,
) -> tuple[MemberState, tuple[MembershipAction, ...]]:
    """Return the state and the first actions of a site that returns, with its newest save.

    Args:
        site: this site.
        sites: number of sites that may take part.
        last_step: last step of the run.
        lease: T, in seconds.
        saved: last step that it has committed; 0: it has no save.
        most_queued: most steps whose sums are held for a returned site, besides the last one.
        join_pause: longest pause for a returned site that does not become level, in seconds.
    """
    unknown = (UNKNOWN,) * sites
    state = MemberState(
        site,
        last_step,
        lease,
        record=None,
        takes_part=False,
        applied=saved,
        committed=saved,
        acted_under=0,
        kept=0,
        computing=False,
        joining=False,
        levels=unknown,
        has_sums=(False,) * sites,
        later_sums=(False,) * sites,
        silence=unknown,
        store_asked=True,
        requests=unknown,
        most_queued=most_queued,
        join_pause=join_pause,
    )
    return state, (ReadRecord(),)


def may_act(state: MemberState, rules: MembershipRules = RULES) -> bool:
    """Return True if a site may save, publish metrics and send."""
    if not state.takes_part or state.joining:
        return False
    if all(state.silence[site] == UNKNOWN for site in members_of(state)):
        return True
    is_holder = state.record is not None and state.record.holder == state.site
    return is_holder and not state.was_suspended and rules.holder_may_act(state)


def keeps(state: MemberState, site: int) -> bool:
    """Return True unless this site is about to evict another, by a swap that may have been done.

    Its signs of life say so to that site, to which they count for nothing then.
    """
    return state.proposed is None or site in state.proposed.members


def transition(
    state: MemberState, event: MembershipEvent, rules: MembershipRules = RULES
) -> tuple[MemberState, tuple[MembershipAction, ...]]:
    """Return the state after an event, and what the caller does now, in order."""
    decision = _Decision(state, rules)
    decision.take(event)
    decision.commit()
    return decision.state, tuple(decision.actions)


class _Decision:
    """One call of `transition`: the state on its way to the next, and the actions so far."""

    def __init__(self, state: MemberState, rules: MembershipRules) -> None:
        self.state = state
        self.rules = rules
        self.actions: list[MembershipAction] = []

    def take(self, event: MembershipEvent) -> None:
        state = self.state
        match event:
            case Elapsed(seconds):
                self.elapse(seconds)
            case Silent(site):
                if state.takes_part and site in members_of(state) and state.silence[site] < 0:
                    self.set(silence=replaced(state.silence, site, 0))
                elif site == state.follower:
                    self.leave(f"site {site}, which is to return, is silent")
            case Gone(site):
                self.lose(site)
            case Heard(site, counts_back):
                self.hear(site, UNKNOWN if counts_back else HALF_HEARD)
            case Received(message):
                self.receive(message)
            case RecordSeen(record):
                self.see(record)
            case StoreUnreachable():
                self.set(store_asked=False, at_boundary=False, paused=UNKNOWN)
                self.say("the store of the record does not answer")
                self.go_on()
            case SumsReady(membership_id, step):
                current = state.record is not None and (
                    (state.record.membership_id, state.applied + 1) == (membership_id, step)
                )
                if state.takes_part and state.computing and current:
                    self.set(computing=False)
                    self.offer()
                    self.go_on()

    # Small steps.

    @property
    def record(self) -> MembershipRecord:
        assert self.state.record is not None, "a site that takes part has a record"
        return self.state.record

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(site for site in self.record.members if site != self.state.site)

    def set(self, **changes: object) -> None:
        # mypy cannot check keywords that come as a mapping.
        self.state = self.state._replace(**changes)  # type: ignore[arg-type]

    def say(self, reason: str) -> None:
        self.actions.append(WaitFor(reason))

    def send(self, site: int, message: MembershipMessage) -> None:
        self.actions.append(SendTo(site, message))

    def read(self) -> None:
        if not self.state.store_asked:
            self.set(store_asked=True)
            self.actions.append(ReadRecord())

    def swap(self, new: MembershipRecord) -> None:
        if not self.state.store_asked:
            self.set(store_asked=True, proposed=new)
            self.actions.append(SwapRecord(self.record, new))

    def turn(self, *, asks: bool = False) -> Turn:
        state = self.state
        return Turn(state.site, self.record, state.applied, state.has_sums[state.site], asks)

    # Time and silence.

    def elapse(self, seconds: float) -> None:
        state = self.state
        if not state.takes_part:
            self.read()
            self.request()
            return
        silence = tuple(
            age if age < 0 or age == math.inf else min(age + seconds, state.lease)
            for age in state.silence
        )
        if seconds >= state.lease * 2 / 3 and self.others:
            # This process was suspended: it has heard nobody, and others may hold the record. They
            # in turn were not silent: the time after which it may evict them begins now.
            silence = tuple(
                0 if site in self.others and age < state.lease else age
                for site, age in enumerate(state.silence)
            )
            self.set(was_suspended=True)
        watched = state.watched
        if watched >= 0:
            watched = min(watched + seconds, state.lease)
        self.set(silence=silence, watched=watched)
        self.pursue()
        if self.state.takes_part and self.state.proposed is not None:
            self.swap(self.state.proposed)  # the last one may be done, or yet to be done
        self.ask_again()
        self.wait_for_follower(seconds)

    def lose(self, site: int) -> None:
        state = self.state
        if state.takes_part and site in self.others:
            self.set(silence=replaced(state.silence, site, math.inf))
            self.pursue()
        else:
            self.set(paused_for=tuple(other for other in state.paused_for if other != site))
            if site == state.follower:
                self.leave(f"site {site}, which was to return, has ended")

    def hear(self, site: int, level: float) -> None:
        state = self.state
        if not state.takes_part or state.silence[site] <= level or not keeps(state, site):
            return
        self.set(silence=replaced(state.silence, site, level))
        if max(self.state.silence) < 0:
            self.set(watched=UNKNOWN)
        if max(self.state.silence) == UNKNOWN:
            self.set(was_suspended=False)
        if site in self.others:
            self.send(site, self.turn(asks=True))

    def pursue(self) -> None:
        """Evict members that are silent for T, through the store."""
        state = self.state
        silent = tuple(site for site in self.others if state.silence[site] >= state.lease / 3)
        if not silent:
            return
        if not self.rules.may_evict(state):
            if all(state.silence[site] == math.inf for site in self.others):
                self.stop(self.record)  # nobody is left who has the state that it was to take
            else:
                self.read()
            return
        new = self.record.without(silent, state.site)
        if not self.rules.evicts_by_store:
            self.adopt(new)
        elif self.record.holder == state.site or self.rules.is_expired(state):
            self.swap(new)
        else:
            self.read()
            if state.silence[self.record.holder] == UNKNOWN:
                self.send(self.record.holder, Unheard(state.site, self.record, silent))

    def separate(self, sender: int, record: MembershipRecord, silent: tuple[int, ...]) -> None:
        """Let one of members leave that do not hear each other, though this holder hears all."""
        state = self.state
        if not state.takes_part or record != state.record or record.holder != state.site:
            return
        sites = [site for site in silent if site in self.others]
        if not sites or sender not in self.others or not self.rules.may_evict(state):
            return
        if state.leaving not in (sender, *sites):
            # Who alone does not hear several members is the one that is cut off.
            self.set(leaving=sites[0] if len(sites) == 1 else sender)
        leaving = self.state.leaving
        assert leaving is not None, "one of them leaves"
        if self.rules.leaves_first:
            self.send(leaving, Leave(state.site, self.record))
        else:
            self.swap(self.record.without((leaving,), state.site))

    def ask_again(self) -> None:
        """Send the turn again to members whose turn is missing: one of the two may be lost."""
        state = self.state
        for site in self.others if state.takes_part else ():
            if not state.has_sums[site] and not state.computing and state.silence[site] < 0:
                self.send(site, self.turn(asks=True))

    # The record.

    def see(self, record: MembershipRecord) -> None:
        state = self.state
        self.set(store_asked=False)
        succeeded = record == state.proposed
        self.set(proposed=None)
        self.learn(record, succeeded=succeeded)
        state = self.state
        if not state.takes_part:
            self.recover()
            return
        if state.record == record and not succeeded and max(state.silence) >= state.lease / 3:
            if state.watched < 0:
                self.set(watched=0)
            rules, is_holder = self.rules, record.holder == state.site
            if rules.is_expired(self.state) and not is_holder and rules.may_evict(self.state):
                self.pursue()
        if self.state.at_boundary and self.state.record == record and not succeeded:
            self.set(at_boundary=False)
        self.go_on()

    def is_admitted(self, record: MembershipRecord) -> bool:
        """Return True if a record admits this returned site, whose state is the one handed over.

        A site that has lost its memory since is a member of such a record too, but not admitted.
        """
        state = self.state
        return state.site in record.members and 0 < state.followed == record.membership_id - 1

    def learn(self, record: MembershipRecord, *, succeeded: bool = False) -> None:
        """Take a record that the store or another site has."""
        state = self.state
        known = 0 if state.record is None else state.record.membership_id
        if record.membership_id < known or (record == state.record and not succeeded):
            return
        if state.takes_part:
            if record.membership_id == known:
                return
            if state.site in record.members:
                self.adopt(record)
            else:
                self.stop(record)
        elif succeeded or record == state.proposed or self.is_admitted(record):
            # Another site may tell of this one's swap before the store does. To ask under that
            # record would count as the return of a site that has lost its state.
            self.adopt(record)
        elif record.membership_id > known:
            self.roll_back()
            self.set(record=record, requests=(UNKNOWN,) * len(state.requests))
            self.request()

    def roll_back(self) -> None:
        """Go back to the site's own save: what it was handed counts under that record alone."""
        state = self.state
        if state.applied != state.committed or state.followed:
            self.set(applied=state.committed, followed=0)
            self.actions.append(RestoreSave(state.committed))

    def adopt(self, record: MembershipRecord) -> None:
        """Take part under a new record: the interrupted step begins again."""
        state = self.state
        sites = len(state.levels)
        levels, has_sums = self.rules.levels_of_new_record(state)
        known = (state.site, *(self.record.members if state.takes_part else ()))
        paused_for = tuple(site for site in state.paused_for if site not in record.members)
        # The record may have changed again since a returned site was admitted: it acts when heard.
        newly = 0 if state.was_suspended or not state.takes_part else UNKNOWN
        silence = tuple(
            UNKNOWN if site not in record.members else age if site in known else newly
            for site, age in enumerate(state.silence)
        )
        self.set(
            record=record,
            takes_part=True,
            acted_under=state.acted_under if state.takes_part else record.membership_id,
            kept=state.kept if state.takes_part else 0,
            computing=False,
            joining=(state.joining or not state.takes_part) and len(record.members) > 1,
            levels=replaced(levels, state.site, state.applied),
            has_sums=replaced(has_sums, state.site, state.applied == state.last_step),
            later_sums=(False,) * sites,
            silence=silence,
            was_suspended=state.takes_part and state.was_suspended and max(silence) != UNKNOWN,
            watched=UNKNOWN,
            proposed=None,
            at_boundary=False,
            leaving=None,
            followed=0,
            requests=(UNKNOWN,) * sites,
            paused_for=paused_for,
        )
        self.state = without_follower(self.state)
        for site in self.others:
            self.send(site, self.turn())
        self.pursue()
        self.go_on()

    def stop(self, record: MembershipRecord) -> None:
        """Take no part any more, and become a returned site."""
        state = self.state
        self.actions.append(StopActing(record))
        fresh, _ = returned(
            state.site,
            len(state.levels),
            last_step=state.last_step,
            lease=state.lease,
            saved=state.committed,
            most_queued=state.most_queued,
            join_pause=state.join_pause,
        )
        self.set(**fresh._replace(record=record, store_asked=state.store_asked)._asdict())
        if state.applied != state.committed:
            self.actions.append(RestoreSave(state.committed))

    # Messages.

    def receive(self, message: MembershipMessage) -> None:
        if isinstance(message, JoinRequest):
            self.consider(message)
            return
        state = self.state
        older = state.record is not None and self.rules.is_older(message.record, state.record)
        if older:
            if not isinstance(message, Refusal):
                self.send(message.sender, Refusal(state.site, self.record))
            return
        self.learn(message.record)
        match message:
            case Turn():
                self.take_turn(message)
            case HandedOver():
                self.take_over(message)
            case Unheard(sender, record, sites):
                self.separate(sender, record, sites)
            case Leave(sender, record):
                if state.takes_part and record == state.record and record.holder == sender:
                    self.stop(record)

    def take_turn(self, turn: Turn) -> None:
        state = self.state
        if not state.takes_part or turn.sender not in self.others:
            return
        level = state.levels[turn.sender]
        if turn.applied >= level:
            self.set(levels=replaced(state.levels, turn.sender, turn.applied))
            if turn.has_sums and turn.applied == state.applied:
                self.set(has_sums=replaced(state.has_sums, turn.sender, True))
            elif turn.applied > state.applied:
                later = turn.has_sums or (turn.applied == level and state.later_sums[turn.sender])
                self.set(later_sums=replaced(state.later_sums, turn.sender, later))
            if turn.applied < state.applied:
                self.hand_over(turn.sender, turn.applied)
            elif turn.asks and not state.computing:
                self.send(turn.sender, self.turn())
        self.go_on()

    def hand_over(self, site: int, applied: int) -> None:
        """Give a site that is behind the sums of the last step, or the state after it."""
        state = self.state
        if state.applied == applied + 1 and state.kept == state.applied:
            self.send(site, HandedOver(state.site, self.record, state.applied, whole=False))
        else:
            self.send(site, HandedOver(state.site, self.record, state.applied, whole=True))

    def take_over(self, handed: HandedOver) -> None:
        state = self.state
        if handed.record != state.record:
            return
        if handed.step == state.applied and handed.whole and not state.takes_part:
            pass
        elif handed.whole:
            if handed.step <= state.applied:
                return
            self.actions.append(TakeState(handed.step))
            self.set(applied=handed.step, kept=0)
        elif self.rules.takes_sums(state.applied, handed.step):
            self.actions.append(
                ApplySums(handed.step, handed.record.membership_id, source=handed.sender)
            )
            self.set(applied=handed.step, kept=handed.step if state.takes_part else 0)
        else:
            return
        if state.takes_part:
            self.after_step()
            self.state = without_follower(self.state)
            self.go_on()
        else:
            self.set(followed=handed.record.membership_id)
            self.request()

    # Steps.

    def offer(self) -> None:
        """Send this site's sums of the next step to all members."""
        state = self.state
        self.set(has_sums=replaced(state.has_sums, state.site, True))
        for site in self.others:
            self.send(site, self.turn())

    def go_on(self) -> None:
        """Apply and begin steps as far as the turns that have come allow."""
        while self.state.takes_part:
            state = self.state
            levels = [state.levels[site] for site in self.record.members]
            if min(levels) >= 0 and max(levels) <= state.applied:
                self.set(joining=False)
            all_sums = all(state.has_sums[site] for site in self.record.members)
            if state.applied == state.last_step or state.at_boundary:
                return
            if all_sums:
                step = state.applied + 1
                self.actions.append(ApplySums(step, self.record.membership_id, source=None))
                self.set(applied=step, kept=step)
                self.after_step()
                self.lead()
                continue
            begun = state.computing or state.has_sums[state.site] or state.paused >= 0
            if not begun and min(levels) >= 0 and max(levels) <= state.applied:
                self.set(computing=True)
                self.actions.append(ComputeSums(self.record, state.applied + 1))
            return

    def after_step(self) -> None:
        """Note the new level; sums count for the step after their sender's level alone."""
        state = self.state
        levels = replaced(state.levels, state.site, state.applied)
        has_sums, later_sums = zip(
            *(
                (later and level == state.applied, later and level > state.applied)
                for later, level in zip(state.later_sums, levels, strict=True)
            ),
            strict=True,
        )
        self.set(levels=levels, has_sums=has_sums, later_sums=later_sums, computing=False)
        if state.applied == state.last_step:
            self.offer()

    # A returned site, which this holder serves.

    def serve(self, request: JoinRequest) -> None:
        state = self.state
        if state.follower not in (None, request.sender):
            if state.requests[request.sender] < 0:
                applied = replaced(state.requests, request.sender, request.applied)
                self.set(requests=applied)
                self.say(f"site {request.sender} returns after site {state.follower} has")
            return
        self.state, handed_over = served(state, request, self.rules)
        for message in handed_over:
            self.send(request.sender, message)
        self.end_pause()

    def lead(self) -> None:
        """Admit the follower if it was level before this step, or else send it the step's sums."""
        state = self.state
        if state.follower is None or not state.queued_from:
            return
        if self.rules.is_level(state, state.applied - 1):
            if self.admit():
                return
            self.set(level_at=state.applied)
        message = HandedOver(state.site, self.record, state.applied, whole=False)
        self.send(state.follower, message)
        state = self.state
        may_pause = state.follower not in state.paused_for and state.applied < state.last_step
        if lags(state) and may_pause:
            self.set(paused=0.0, paused_for=(*state.paused_for, state.follower))
            self.say(f"for site {state.follower} to become level, {state.join_pause:g} s at most")
        elif overflows(state):
            self.state = begun_again(state)
            self.say(
                f"site {state.follower} takes the state anew; it lacked more than "
                f"{state.most_queued} steps"
            )

    def admit(self) -> bool:
        """Admit the follower, which lacks the sums of the last step at most.

        Returns:
            False if that must wait.
        """
        state = self.state
        assert state.follower is not None, "there is a site to admit"
        undisturbed = max(state.silence) == UNKNOWN and not state.store_asked
        if not undisturbed or state.applied == state.last_step:
            return False
        self.set(at_boundary=True)
        self.swap(self.record.with_site(state.follower))
        return True

    def end_pause(self) -> None:
        """Admit the follower if the members have paused until it is level."""
        state = self.state
        if state.paused >= 0 and self.rules.is_level(state, state.applied):
            self.admit()

    def wait_for_follower(self, seconds: float) -> None:
        state = self.state
        if state.follower is None:
            return
        unasked, paused = state.unasked + seconds, state.paused
        if paused >= 0:
            paused += seconds
        if unasked >= state.lease:
            self.leave(f"site {state.follower}, which is to return, is silent")
        elif paused >= state.join_pause:
            self.leave(
                f"no more for site {state.follower}, which is not level after a pause of "
                f"{state.join_pause:g} s"
            )
        else:
            self.set(unasked=unasked, paused=paused)
            self.end_pause()

    def leave(self, reason: str) -> None:
        """Serve the follower no more, and go on."""
        self.state = without_follower(self.state)
        self.say(reason)
        self.go_on()

    def commit(self) -> None:
        """Act on the last step when all members have it, and drop its sums.

        An act under the record before may have been refused, and is done again.
        """
        state = self.state
        if not state.takes_part or not may_act(state, self.rules):
            return
        membership_id = self.record.membership_id
        if state.committed < state.applied and self.rules.is_acknowledged(state):
            self.actions.append(CommitStep(state.applied, membership_id))
            if state.kept and not state.at_boundary:  # the site that is admitted lacks them
                self.actions.append(ReleaseSums(state.kept))
                self.set(kept=0)
            self.set(committed=state.applied, acted_under=membership_id)
        elif state.acted_under != membership_id:
            if state.committed:
                self.actions.append(CommitStep(state.committed, membership_id))
            self.set(acted_under=membership_id)

    # Return.

    def request(self) -> None:
        """Ask every site to take part."""
        state = self.state
        known = 0 if state.record is None else state.record.membership_id
        for site in range(len(state.levels)):
            if site != state.site:
                follows = 0 < state.followed == known
                self.send(site, JoinRequest(state.site, known, state.applied, follows))

    def consider(self, request: JoinRequest) -> None:
        state = self.state
        known = 0 if state.record is None else state.record.membership_id
        if request.membership_id > known:
            self.read()
        elif request.membership_id < known:
            self.send(request.sender, Refusal(state.site, self.record))
        elif not known:
            return
        elif not state.takes_part:
            self.set(requests=replaced(state.requests, request.sender, request.applied))
            self.recover()
        elif request.sender in self.others:
            self.lose(request.sender)  # its process has ended and begun again
        elif self.record.holder == state.site:
            self.serve(request)

    def recover(self) -> None:
        """Begin again from the newest save, when all sites of the run have lost their states.

        A site that was evicted may have acted on a step that no member's save has: all must be
        back.
        """
        state = self.state
        if state.record is None:
            return
        saves = dict(enumerate(replaced(state.requests, state.site, state.applied)))
        missing = [site for site, step in saves.items() if step < 0]
        if missing:
            if set(self.record.members) <= {state.site, *(set(saves) - set(missing))}:
                self.say(f"all members have lost their states; sites {missing} are not back")
            return
        newest = max(saves.values())
        if min(site for site, step in saves.items() if step == newest) == state.site:
            new = MembershipRecord(self.record.membership_id + 1, (state.site,), state.site)
            self.swap(new)
