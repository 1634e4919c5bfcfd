"""Sums and states that a site hands to others, which lack a step or return to the run.

All of this yields to the messages of a step. What a site has not fetched stays in host memory;
`geojax.membership.transition` bounds how many steps.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from geojax.islands.programs.values import StepSums
from geojax.membership.events import HandedOver
from geojax.membership.notes import as_note
from geojax.step.state import TrainState
from geojax.transport import CarrierTransport, Fetch, LostPeerError, MessageKey
from geojax.transport.host_memory import size_of
from geojax.transport.shards import HeldArray, local_shapes


def handed_part(state: TrainState) -> TrainState:
    """Return what a site hands to another of its state, or of what is shaped like one.

    Rounding errors are each site's own, and frozen weights are read from a folder.
    """
    return dataclasses.replace(state, error_feedback=None, frozen=None)


class HandedBytes(NamedTuple):
    """The bytes that a site hands to one that returns."""

    state: int
    sums: int
    """Bytes of the sums of a step."""


def bytes_in_process(like: Any) -> int:
    """Return the bytes of a tree of `jax.ShapeDtypeStruct`s that this process hands over."""
    return size_of([shape for leaf in jax.tree.leaves(like) for shape in local_shapes(leaf)])


class HandingOver:
    """The sums and states that one site hands to others, in one of its processes.

    Args:
        transport: joins the site to the others.
        tells: this process tells the other sites; the site's other processes offer their shards.
    """

    def __init__(self, transport: CarrierTransport, *, tells: bool):
        self._transport, self._tells = transport, tells
        self._sums: tuple[int, StepSums] | None = None
        """The sums of the last step that this site has applied, with its number."""
        self._state: tuple[int, TrainState] | None = None
        """The state that is on the devices, with the number of steps done."""
        self._copying: threading.Thread | None = None
        self._given: set[_Gift] = set()
        self._to_members: list[tuple[int, HandedOver, StepSums]] = []
        """Sums that were offered to members, which may take those of another site."""
        self._due: dict[int, HandedOver] = {}
        """States to hand over as soon as they are on the devices, by site."""

    def keep(self, step: int, sums: StepSums) -> None:
        """Keep the sums of a step until `release`."""
        self._sums = step, sums

    def release(self, step: int) -> None:
        """Drop the sums of a step, which all members have."""
        if self._sums is not None and self._sums[0] == step:
            self._sums = None
        given, self._to_members = self._to_members, []
        for site, note, sums in given:
            for number, message in enumerate(messages_of(sums)):
                self._transport.take_back(site, _key(note, number), jax.tree.leaves(message))

    def hold(self, step: int, state: TrainState) -> None:
        """Take the state after a step, which nobody changes before `let_go`."""
        self._state = step, state
        due, self._due = self._due, {}
        for site, note in due.items():
            self.hand_over(site, note, is_member=False)

    def let_go(self) -> None:
        """Let go of the state, which an update is about to take, when it is copied."""
        self._state = None
        if self._copying is not None:
            self._copying.join()
            self._copying = None

    def hand_over(self, site: int, note: HandedOver, *, is_member: bool) -> None:
        """Offer what a note says, and tell of it; what was offered before is not copied again.

        Args:
            site: the receiver.
            note: names the sums of the last step, or the state after it.
            is_member: the site takes part.
        """
        if site not in self._transport.links:
            return
        gift = _Gift(site, note.step, note.whole, note.record.membership_id)
        if gift not in self._given:
            if note.whole and (self._state is None or self._state[0] != note.step):
                self._due[site] = note
                return
            self._given.add(gift)
            if note.whole:
                self._offer_state(site, note)
            else:
                self._offer_sums(site, note)
                if is_member:
                    assert self._sums is not None, "they were offered"
                    self._to_members.append((site, note, self._sums[1]))
        if self._tells:
            with contextlib.suppress(LostPeerError):
                self._transport.note(site, as_note(note))

    def forget(self, site: int) -> None:
        """Note that a site has lost what it was given."""
        self._given = {gift for gift in self._given if gift.site != site}
        self._due.pop(site, None)

    def _offer_sums(self, site: int, note: HandedOver) -> None:
        assert self._sums is not None, "sums are kept until all members have them"
        step, sums = self._sums
        assert step == note.step, "they are those of the last step"
        for number, message in enumerate(messages_of(sums)):
            with contextlib.suppress(LostPeerError):
                arrays = jax.tree.leaves(message)
                self._transport.offer(site, _key(note, number), arrays, yields=True)

    def _offer_state(self, site: int, note: HandedOver) -> None:
        """Copy the state to host memory beside the step that is computed from it, and offer it."""
        assert self._state is not None, "it was checked"
        _, state = self._state
        if self._copying is not None:
            self._copying.join()
        copy = functools.partial(self._copy, site, note, jax.tree.leaves(handed_part(state)))
        self._copying = threading.Thread(target=copy, name="geojax state", daemon=True)
        self._copying.start()

    def _copy(self, site: int, note: HandedOver, leaves: Sequence[jax.Array]) -> None:
        for number, leaf in enumerate(leaves):
            held = HeldArray.of(leaf)
            with contextlib.suppress(LostPeerError, KeyError):  # it is lost again
                self._transport.offer_held(site, _key(note, number), held)


class Incoming:
    """Sums or a state on their way from another site.

    Args:
        transport: joins the site to the others.
        note: says what comes.
        like: the sums or the state, as `jax.ShapeDtypeStruct`s.

    Raises:
        LostPeerError: the other site is lost.
    """

    def __init__(self, transport: CarrierTransport, note: HandedOver, like: Any):
        self.note, self._like = note, like
        parts = jax.tree.leaves(like) if note.whole else messages_of(like)
        self._fetches: list[Fetch] = [
            transport.fetch(note.sender, _key(note, number), jax.tree.leaves(part))
            for number, part in enumerate(parts)
        ]

    def arrived(self) -> bool:
        """Return True if all is here."""
        return all(fetch.arrived() for fetch in self._fetches)

    def result(self) -> Any:
        """Return the sums or the state, which have arrived."""
        leaves = [leaf for fetch in self._fetches for leaf in fetch.result()]
        return jax.tree.unflatten(jax.tree.structure(self._like), leaves)


class _Gift(NamedTuple):
    """Something that was offered."""

    site: int
    step: int
    whole: bool
    membership_id: int


def messages_of(sums: StepSums) -> list[Any]:
    """Return the messages in which sums travel: one for each chunk, and the scalars."""
    return [*sums.totals, sums.scalars]


def _key(note: HandedOver, number: int) -> MessageKey:
    """Return the key of a message of sums or of a state."""
    kind = "state" if note.whole else "sums"
    return MessageKey(note.step, kind, part=number, membership_id=note.record.membership_id)
