"""Messages of membership as short notes, in which they travel between sites."""

import json
from typing import Any

from geojax.errors import RunError
from geojax.membership.events import HandedOver, MembershipMessage, Refusal, Turn
from geojax.membership.record import MembershipRecord

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Turn, HandedOver, Refusal)}


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
        kind, *fields = json.loads(note)
        message = _KINDS[kind](*fields)
        membership_id, members, holder = message.record
        record = MembershipRecord(int(membership_id), tuple(map(int, members)), int(holder))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RunError(f"site {sender} has sent a note that is none of this version") from None
    made: MembershipMessage = message._replace(sender=sender, record=record)
    return made
