"""Messages of membership as short notes, in which they travel between sites."""

import json
from typing import Any

from geojax.errors import RunError
from geojax.membership.events import (
    HandedOver,
    JoinRequest,
    Leave,
    MembershipMessage,
    Refusal,
    Turn,
    Unheard,
)
from geojax.membership.record import MembershipRecord

_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Turn, HandedOver, JoinRequest, Refusal, Unheard, Leave)
}
_MOST = 2**53
"""Numbers of steps and records are smaller: another program may read JSON's numbers as floats."""


def as_note(message: MembershipMessage) -> bytes:
    """Return a message as a note."""
    return json.dumps([type(message).__name__, *message], separators=(",", ":")).encode()


def message_of(note: bytes, sender: int) -> MembershipMessage:
    """Return the message in a note.

    Args:
        note: content that came from `sender`.
        sender: number of the site.

    Raises:
        RunError: it is none.
    """
    try:
        kind, *values = json.loads(note)
        types = _KINDS[kind].__annotations__.values()
        fields = (_checked(value, type_) for value, type_ in zip(values, types, strict=True))
        message: MembershipMessage = _KINDS[kind](*fields)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RunError(f"site {sender} has sent a note that is none of this version") from None
    return message._replace(sender=sender)


def _checked(value: Any, type_: Any) -> Any:
    """Return a field of a message.

    Raises:
        ValueError, TypeError: it is something else.
    """
    if type_ is MembershipRecord:
        membership_id, members, holder = value
        record = MembershipRecord(
            _number(membership_id), tuple(map(_number, members)), _number(holder)
        )
        if record.members != tuple(sorted(set(record.members))) or holder not in record.members:
            raise ValueError("the members of a record ascend, and the holder is one")
        return record
    if type_ == tuple[int, ...]:
        if type(value) is not list:
            raise TypeError("numbers of sites are meant")
        return tuple(map(_number, value))
    if type_ is int:
        return _number(value)
    if type(value) is not bool:
        raise TypeError("a truth value is meant")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError("a number that counts something is meant")
    return value
