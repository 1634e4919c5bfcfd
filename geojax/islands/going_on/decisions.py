"""Decisions of the first process of a site for all its processes, and reports of the others.

All processes do what is decided in the same order, so that they run the same programs. A decision
or report travels as JSON: its type, and its values.
"""

import json
from typing import Any, NamedTuple, TypeAlias

from geojax.errors import RunError
from geojax.membership.events import (
    ApplySums,
    ComputeSums,
    HandedOver,
    ReleaseSums,
    SumsReady,
    TakeState,
)
from geojax.membership.record import MembershipRecord
from geojax.transport.endpoint import ProcessOfSite


class Adopt(NamedTuple):
    """Take part under a record, without the work under the one before."""

    record: MembershipRecord


class TakeUp(NamedTuple):
    """Exchange messages with a new start of a site."""

    site: int
    start: int
    """Number of the start, by which reports about earlier ones are told apart."""
    processes: tuple[ProcessOfSite, ...]


class PartWith(NamedTuple):
    """Exchange nothing with a site any more."""

    site: int


class HandOver(NamedTuple):
    """Offer another site what it lacks."""

    site: int
    note: HandedOver
    is_member: bool


class FetchHanded(NamedTuple):
    """Fetch what another site hands over."""

    number: int
    """Counts all of them."""
    note: HandedOver


class TakeHanded(NamedTuple):
    """Take what has come to all processes, the first of what is on its way."""

    keeps: bool
    """The sums are kept for other members."""


class DropHanded(NamedTuple):
    """Fetch nothing more of what is on its way."""


class BeginAgain(NamedTuple):
    """Forget all that another site has handed over: the sites that take part have changed."""


class ConnectMore(NamedTuple):
    """Connect with sites that take part since this one has begun to return."""

    sites: tuple[int, ...]


class EndReturn(NamedTuple):
    """Compute as other sites do from now on."""

    applied: int
    """Steps in the state of all sites."""


class Fence(NamedTuple):
    """End: the run goes on without this site."""

    reason: str


class Agreed(NamedTuple):
    """The sites whose messages of an exchange have come to all processes."""

    number: int
    """Counts the exchanges."""
    sites: tuple[int, ...]


Decision: TypeAlias = (
    Adopt
    | Agreed
    | ApplySums
    | BeginAgain
    | ComputeSums
    | ConnectMore
    | DropHanded
    | EndReturn
    | Fence
    | FetchHanded
    | HandOver
    | PartWith
    | ReleaseSums
    | TakeHanded
    | TakeState
    | TakeUp
)


class SeenLink(NamedTuple):
    """A link to another site as a process sees it; reported whenever that changes."""

    site: int
    start: int
    """Number of the site's start."""
    lost: str | None
    """Reason why the process at the other end is lost."""
    is_silent: bool


class HandedCame(NamedTuple):
    """A process has what another site handed over, its own shards of it."""

    number: int


class Answered(NamedTuple):
    """The sites whose messages of an exchange have come to a process."""

    number: int
    sites: tuple[int, ...]


Report: TypeAlias = Answered | HandedCame | SeenLink | SumsReady
"""`SumsReady`: all sums of a step are at a process, its own shards of them."""

_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Adopt, Agreed, Answered, ApplySums, BeginAgain, ComputeSums, ConnectMore),
        *(DropHanded, EndReturn, Fence),
        *(FetchHanded, HandOver, HandedCame, HandedOver, MembershipRecord, PartWith),
        *(ProcessOfSite, ReleaseSums, SeenLink, SumsReady, TakeHanded, TakeState, TakeUp),
    )
}


def as_text(message: Decision | Report) -> str:
    """Return a decision or report as text."""
    return json.dumps(_plain(message), separators=(",", ":"))


def decision_of(text: str) -> Decision:
    """Return the decision in a text of `as_text`.

    Raises:
        RunError: there is none.
    """
    return _of(text, Decision)


def report_of(text: str) -> Report:
    """Return the report in a text of `as_text`.

    Raises:
        RunError: there is none.
    """
    return _of(text, Report)


def _of(text: str, kinds: Any) -> Any:
    try:
        made = _read(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        made = None
    if not isinstance(made, kinds):
        raise RunError("a process of this site sends what is none of this version")
    return made


def _plain(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    values = [_plain(each) for each in value]
    return {type(value).__name__: values} if hasattr(value, "_fields") else values


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        ((name, values),) = value.items()
        return _TYPES[name](*map(_read, values))
    return tuple(map(_read, value)) if isinstance(value, list) else value
