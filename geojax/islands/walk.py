"""The walk of a site through its actions: a host loop that dispatches programs and moves messages.

Programs are dispatched in the order of the list and run one after the other on the devices. A
program that takes a message is dispatched after the message has arrived. XLA for CPUs runs
computations in the order of their dispatch, so a program that waited for its input would block all
later ones. The walk never chooses by arrival: processes of a site would then disagree about the
order of their collectives.
"""

import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.errors import RunError
from geojax.islands.actions import (
    Add,
    Apply,
    Bucket,
    Message,
    Receive,
    Reduce,
    Send,
    SiteAction,
    SumPart,
    received,
    sent,
)
from geojax.islands.fetch_window import FetchWindow
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.programs.values import (
    ChunkParameters,
    ChunkSums,
    Kept,
    PassInputs,
    Reduced,
    StepInputs,
    StepScalars,
    StepSums,
)
from geojax.islands.recording import Recorded
from geojax.islands.traffic import OFFER, LinkTraffic, no_traffic
from geojax.pipeline.schedule import Action, Kind
from geojax.transport import Fetch, MessageKey, Transport
from geojax.transport.mute import zeros
from geojax.transport.private import is_ready

_POLL_SECONDS = 0.002
"""Between two looks at the devices while a message is not here; it wakes the host when it comes."""


class Walk:
    """The steps of one site.

    Args:
        actions: the site's, in one step.
        windows: messages to fetch ahead from each other site (see `geojax.islands.actions`).
        programs: the site's.
        transport: joins the site to the others.
        before: walk over the same transport that this one goes on from; None: there is none.
    """

    def __init__(
        self,
        actions: Sequence[SiteAction],
        windows: Mapping[int, int],
        programs: SitePrograms,
        transport: Transport,
        before: "Walk | None" = None,
    ):
        self.actions, self.windows = actions, windows
        self.programs, self.transport = programs, transport
        self.traffic: Mapping[int, LinkTraffic] = {}
        """Traffic of the last step with each other site."""
        self.steps: int = 0 if before is None else before.steps
        self.numbers: Iterator[int] = itertools.count(1) if before is None else before.numbers
        """Numbers of passes, by which the messages of one differ from those of others."""
        self.membership_id = 0
        """Record of who takes part, whose shares the actions are of; 0: there is none."""
        self.shares = _shares(actions)
        """The shares of the batch that the site computes, its own first."""
        self._abandoned: _Step | None = None

    def take_shares(
        self, actions: Sequence[SiteAction], windows: Mapping[int, int], membership_id: int
    ) -> None:
        """Compute other shares of the batch from now on, by the same programs.

        Args:
            actions: the site's, in one step.
            windows: messages to fetch ahead from each other site.
            membership_id: record of who takes part.
        """
        self.actions, self.windows, self.shares = actions, windows, _shares(actions)
        self.membership_id = membership_id

    def number_from(self, number: int) -> None:
        """Give the next pass a number, where sites may have come to it by other ways."""
        self.numbers = itertools.count(number)

    def step(
        self,
        state: Any,
        signals: jax.Array,
        inputs: Sequence[StepInputs],
        record: list[Recorded] | None = None,
        summed: Callable[[StepSums], None] = lambda sums: None,
    ) -> tuple[Any, Any]:
        """Run one step; its last programs may still run when this returns.

        An error before `summed` has returned leaves the state as it is. If the next step begins
        with this state too, it is the same one, and takes the gradients of shares that this one has
        come to.

        Args:
            state: the site's `TrainState`; donated by the last program.
            signals: requests of the site's ranks.
            inputs: each of the site's `shares` of the batch, and what is the same at all sites.
            record: gets the times of every action; the host then waits for each one's programs
                before the next, while messages travel as ever.
            summed: called with the sums of all sites before the update.

        Returns:
            The next state and the metrics, the same at all sites.

        Raises:
            RunError: another site is lost.
        """
        reduced, self._abandoned = self._reduced_before(state), None
        step = _Step(self, state, signals, inputs, summed, reduced)
        try:
            made = step.run() if record is None else step.run_recorded(record)
        except RunError:
            self._abandoned = step
            raise
        return self._done(step, made)

    def apply(self, sums: StepSums) -> tuple[Any, Any]:
        """Do the end of the step that was abandoned, with sums that another site has.

        They hold the sums of this site, so that it had come to its additions.

        Returns:
            The next state and the metrics, the same at all sites.
        """
        step, self._abandoned = self._abandoned, None
        assert step is not None, "a step was abandoned"
        return self._done(step, step.apply(sums))

    def _reduced_before(self, state: Any) -> dict[tuple[int, int], Reduced]:
        """Return the gradients that a step of this state has come to before it was abandoned.

        They are by share and chunk, of the shares that this site still computes, if they are whole.
        """
        if self._abandoned is None:
            return {}
        reduced, chunks = self._abandoned.reduced_of(state), self.programs.part.chunks
        whole = [
            share for share in self.shares if all((share, chunk) in reduced for chunk in chunks)
        ]
        return {(share, chunk): reduced[share, chunk] for share in whole for chunk in chunks}

    def _done(self, step: "_Step", made: tuple[Any, Any]) -> tuple[Any, Any]:
        self.steps += 1
        self.traffic = step.traffic
        return made

    def validation_sums(
        self,
        actions: Sequence[SiteAction],
        windows: Mapping[int, int],
        state: Any,
        inputs: StepInputs,
    ) -> jax.Array:
        """Return [sum of losses, number of targets] of a batch, without dropout, of this site.

        They are zeros where the site has no head.

        Args:
            actions: the site's (see `geojax.islands.actions.forward_actions`).
            windows: messages to fetch ahead from each other site.
            state: the site's `TrainState`.
            inputs: the batch.

        Raises:
            RunError: another site is lost.
        """
        weights = state.evaluated_weights, state.amax_history
        return _Validation(self, actions, windows, weights, [inputs]).run()

    def message_bytes(
        self, messages: Callable[[SiteAction], Iterator[tuple[int, Message]]]
    ) -> Mapping[int, int]:
        """Return the bytes of a step's messages by the other site.

        Args:
            messages: of an action, each with that site: `sent` or `received`.
        """
        made: Counter[int] = Counter()
        for action in self.actions:
            for other, message in messages(action):
                for leaf in jax.tree.leaves(self.programs.payload(message)):
                    made[other] += math.prod(leaf.shape) * leaf.dtype.itemsize
        return made


def _shares(actions: Sequence[SiteAction]) -> tuple[int, ...]:
    """Return the shares of the batch that actions compute, in their order."""
    reduces = (action for action in actions if isinstance(action, Reduce))
    return tuple(dict.fromkeys(action.share for action in reduces))


def _begin_fetch(
    programs: SitePrograms, transport: Transport, place: MessageKey, sender: int, message: Message
) -> Fetch:
    like = jax.tree.leaves(programs.payload(message))
    return transport.fetch(sender, place._replace(**message._asdict()), like)


class _Pass:
    """A pass under way: values that later actions take, each dropped when it was taken."""

    def __init__(
        self,
        walk: Walk,
        actions: Sequence[SiteAction],
        windows: Mapping[int, int],
        weights: tuple[Any, Any],
        inputs: Sequence[StepInputs],
    ):
        self._actions, self._inputs = actions, inputs
        self._microbatches = walk.programs.plan.layout.batch.microbatches
        self._programs, self._transport = walk.programs, walk.transport
        self._place = MessageKey(next(walk.numbers), "", membership_id=walk.membership_id)
        self.traffic = no_traffic(actions)
        # Without a way back to the pass: in a cycle its arrays would wait for Python's collector.
        begin = functools.partial(_begin_fetch, walk.programs, walk.transport, self._place)
        self._window = FetchWindow(actions, windows, begin)
        gathered = self._programs.gather(*weights)
        self._weights: dict[int, ChunkParameters] = {
            chunk: self._programs.chunk_weights(gathered, chunk)
            for chunk in self._programs.part.chunks
        }
        self._newest: Any = gathered
        """Results of the last program: when one is there, the devices have nothing left to do."""
        self._taken_by: dict[Action, Any] = {}
        """The stream or cotangent that an action takes."""
        self._kept: dict[tuple[int, int], Kept] = {}
        self._arrivals: list[float] = []
        self._took = 0.0

    def _given(self, action: Action) -> PassInputs:
        """Return the arguments of an action, and let go of what no other one takes."""
        _, microbatch, chunk = action
        share, of_share = divmod(microbatch, self._microbatches)
        return PassInputs(
            self._weights[chunk],
            self._taken_by.pop(action, None),
            self._kept.pop((microbatch, chunk), None),
            self._inputs[share],
            np.int32(of_share),
        )

    def _receive(self, action: Receive) -> None:
        ((sender, message),) = received(action)
        self._newest = self._programs.whole(self._take(sender, message))
        self._taken_by[action.action] = self._newest

    def _send(self, action: Send) -> None:
        self._newest = self._programs.divide(self._taken_by.pop(action.action))
        self._offer(action, self._newest)

    def _offer(self, action: SiteAction, payload: Any) -> None:
        arrays = jax.tree.leaves(payload)
        for receiver, message in sent(action):
            counters = self._transport.counters[receiver]
            waited = counters.offer_wait_seconds
            with self._shown("offer to", receiver, message):
                self._transport.offer(receiver, self._place._replace(**message._asdict()), arrays)
            link = self.traffic[receiver]
            if self._devices_are_idle():
                link.wait_seconds[OFFER] += counters.offer_wait_seconds - waited
            link.messages_in_flight = max(link.messages_in_flight, counters.messages_in_flight)

    def _take(self, sender: int, message: Message) -> Any:
        fetch = self._window.fetch(sender, message)
        newest = jax.tree.leaves(self._newest)[0]
        with self._shown("wait for", sender, message):
            while not fetch.arrived() and not is_ready(newest):
                self._transport.check()
                fetch.wait(_POLL_SECONDS)
            idle_since = time.monotonic()
            arrays = self._window.take(sender, message)
            self._took = time.monotonic()
        self._arrivals.append(self._took if fetch.arrival is None else fetch.arrival)
        self.traffic[sender].wait_seconds[message.kind] += self._took - idle_since
        return jax.tree.unflatten(jax.tree.structure(self._programs.payload(message)), arrays)

    def _shown(self, does: str, site: int, message: Message) -> jax.profiler.TraceAnnotation:
        """Show in profiles that the host waits for a message of a link, or offers one."""
        name = f"{does} {self._transport.site_names[site]}: {message.kind}"
        return jax.profiler.TraceAnnotation(
            name, microbatch=message.microbatch, chunk=message.chunk
        )

    def _devices_are_idle(self) -> bool:
        return is_ready(jax.tree.leaves(self._newest)[0])


class _Validation(_Pass):
    """A validation of sites that hold a part of the model each: forwards through all of them."""

    def run(self) -> jax.Array:
        losses = []
        for action in self._actions:
            match action:
                case Receive():
                    self._receive(action)
                case Send():
                    self._send(action)
                case Action(_, _, chunk):
                    passes = self._programs.forward_only
                    self._newest = made = passes[chunk](self._given(action))
                    if self._programs.part.is_last(chunk):
                        losses.append(made)
                    else:
                        self._taken_by[action._replace(chunk=chunk + 1)] = made
        sums: jax.Array = self._programs.validation_sums(losses, *self._inputs)
        return sums


class _Step(_Pass):
    """One step under way."""

    def __init__(
        self,
        walk: Walk,
        state: Any,
        signals: jax.Array,
        inputs: Sequence[StepInputs],
        summed: Callable[[StepSums], None],
        reduced: dict[tuple[int, int], Reduced],
    ):
        weights = state.parameters, state.amax_history
        super().__init__(walk, walk.actions, walk.windows, weights, inputs)
        self._state, self._signals, self._shares = state, signals, walk.shares
        self._summed = summed
        self._reduced = reduced
        """A chunk's sums over the site, by share and chunk."""
        self._reduced_before = frozenset(share for share, _ in reduced)
        """The shares whose sums are those of the step that was abandoned."""
        assert len(inputs) == len(self._shares), "a batch for each share"
        self._is_split = any(
            isinstance(each, Action) and each.kind is Kind.WEIGHT for each in walk.actions
        )
        self._sums: dict[int, ChunkSums | None] = {}
        """Sums of the share under way, by chunk."""
        self._begin_share(0)
        self._newest = self._sums, self._newest
        self._table_of_head: Any = {}
        self._offered: dict[tuple[Bucket, SumPart], Any] = {}
        self._totals: dict[int, Any] = {}
        self._scalars: StepScalars
        self._applied: tuple[Any, Any]
        self._amax: Any = None

    def _begin_share(self, number: int) -> None:
        """Begin the sums of a share of the batch, by its number among the site's."""
        if self._shares[number] in self._reduced_before:
            return
        is_only = self._microbatches == 1  # a backward, which makes the sums itself
        for chunk, own in self._weights.items():
            self._sums[chunk] = (
                None if is_only else self._programs.start[chunk](own, self._inputs[number])
            )

    def reduced_of(self, state: Any) -> Mapping[tuple[int, int], Reduced]:
        """Return the gradients so far, by share and chunk, if the step begins with this state."""
        return self._reduced if state is self._state else {}

    def run(self) -> tuple[Any, Any]:
        for action in self._actions:
            self._do(action)
        return self._applied

    def run_recorded(self, record: list[Recorded]) -> tuple[Any, Any]:
        jax.block_until_ready(self._newest)
        for action in self._actions:
            self._arrivals = []
            start = self._took = time.monotonic()
            self._do(action)
            dispatched = time.monotonic()
            jax.block_until_ready(self._newest)
            times = (start, self._took, dispatched, time.monotonic())
            record.append(Recorded(action, *times, tuple(self._arrivals)))
        return self._applied

    def _do(self, action: SiteAction) -> None:
        # Between two messages of a long step the host waits for the device alone.
        self._transport.check()
        match action:
            case Action() if self._share_of(action) in self._reduced_before:
                pass
            case Action(Kind.FORWARD):
                self._forward(action)
            case Action(Kind.BACKWARD):
                self._backward(action)
            case Action(Kind.WEIGHT):
                self._weight_gradients(action)
            case Receive():
                self._receive(action)
            case Send():
                self._send(action)
            case Reduce(bucket, _, share):
                part = SumPart(share, self._transport.site)
                self._newest = self._offered[bucket, part] = self._reduce(bucket, share)
                self._offer(action, self._newest)
            case Add():
                self._add(action)
            case Apply():
                sums = StepSums(self._chunk_totals, self._scalars)
                self._summed(sums)
                self.apply(sums)

    def _share_of(self, action: Action) -> int:
        return self._shares[action.microbatch // self._microbatches]

    def _forward(self, action: Action) -> None:
        _, microbatch, chunk = action
        x, kept = self._newest = self._programs.forward[chunk](self._given(action))
        self._kept[microbatch, chunk] = kept
        if not self._programs.part.is_last(chunk):
            self._taken_by[action._replace(chunk=chunk + 1)] = x

    def _backward(self, action: Action) -> None:
        _, microbatch, chunk = action
        passes = self._programs.input_gradient if self._is_split else self._programs.backward
        given = self._given(action)
        x, self._sums[chunk], stash = passes[chunk](given, self._sums[chunk])
        self._newest = x, self._sums[chunk]
        if self._is_split:
            self._kept[microbatch, chunk] = given.kept._replace(stash=stash)
        if not self._programs.part.is_first(chunk):
            self._taken_by[action._replace(chunk=chunk - 1)] = x

    def _weight_gradients(self, action: Action) -> None:
        passes, sums = self._programs.weight_gradients, self._sums[action.chunk]
        self._newest = self._sums[action.chunk] = passes[action.chunk](self._given(action), sums)

    def _reduce(self, bucket: Bucket, share: int) -> Any:
        programs, part = self._programs, self._programs.part
        number, own = self._shares.index(share), self._shares[0]
        if bucket == "table":
            buckets = {chunk: self._reduced[share, chunk].messages for chunk in part.chunks}
            return programs.divide(part.table(buckets))
        if bucket == "scalars":
            of_chunks = [self._reduced[share, chunk].scalars for chunk in part.chunks]
            totals = None if part.holds_all else self._chunk_totals
            scalars, amax = programs.reduce_scalars(
                of_chunks, totals, self._inputs[number], self._signals
            )
            if share == own:
                self._amax = amax
            if number + 1 < len(self._shares):
                self._begin_share(number + 1)
            return scalars
        if bucket == "site_scalars" or bucket == "step_scalars":
            return programs.divide(self._scalars)
        if share == self._shares[-1]:
            del self._weights[bucket]  # the chunk has run for the last time
        if share in self._reduced_before:
            return self._reduced[share, bucket].messages
        sums = self._sums.pop(bucket)
        assert sums is not None, "a chunk runs backwards before it is reduced"
        if part.is_last(bucket):
            self._table_of_head = part.table_of_head(sums)
        errors = self._state.error_feedback
        if share != own:  # those of the site that is lost are lost too
            errors = jax.tree.map(jnp.zeros_like, errors)
        reduced = programs.reduce[bucket](
            sums,
            self._table_of_head if part.is_first(bucket) else {},
            errors,
            self._inputs[number],
        )
        self._reduced[share, bucket] = reduced
        return reduced.messages

    def _add(self, action: Add) -> None:
        programs, bucket = self._programs, action.bucket
        own = [key for key in self._offered if key[0] == bucket]
        parts = {part: self._offered.pop((bucket, part)) for _, part in own}
        for part, (sender, message) in zip(action.parts, received(action), strict=True):
            parts[part] = self._take(sender, message)
        own_part = next(iter(parts.values()))
        for share in action.left_out:
            nothing = jax.tree.map(lambda leaf: zeros([leaf])[0], own_part)
            parts[SumPart(share, self._transport.site)] = nothing
        in_order = [parts[part] for part in sorted(parts)]
        if isinstance(bucket, str) and bucket != "table":
            self._newest = self._scalars = programs.add_scalars(in_order)
        elif bucket == "table":
            chunk, table = programs.part.table_chunk, programs.add_table(in_order)
            self._newest = table
            messages = self._reduced[self._shares[0], chunk].messages
            self._totals[chunk] = programs.part.with_table(messages, table)
        else:
            self._newest = self._totals[bucket] = programs.add[bucket](in_order)

    @property
    def _chunk_totals(self) -> list[Any]:
        """The gradients of each chunk; those that no other site has a part of are whole here."""
        return [
            self._totals[chunk]
            if chunk in self._totals
            else self._reduced[self._shares[0], chunk].messages
            for chunk in self._programs.part.chunks
        ]

    def apply(self, sums: StepSums) -> tuple[Any, Any]:
        """Update the state, which is donated; return the next one and the metrics."""
        own, chunks = self._shares[0], self._programs.part.chunks
        errors = [self._reduced[own, chunk].error_feedback for chunk in chunks]
        self._newest = self._applied = self._programs.apply(
            self._state, sums.totals, sums.scalars, self._amax, errors
        )
        return self._applied
