"""Messages of membership between sites."""

import pytest

from geojax.errors import RunError
from geojax.membership.events import HandedOver, JoinRequest, Leave, Refusal, Turn, Unheard
from geojax.membership.notes import as_note, message_of
from geojax.membership.record import MembershipRecord
from geojax.transport.control import MOST_CONTENT_BYTES

RECORD = MembershipRecord(3, (0, 2, 5), 2)


@pytest.mark.parametrize(
    "message",
    [
        Turn(2, RECORD, 7, has_sums=True, asks=True),
        HandedOver(2, RECORD, 7, whole=False),
        JoinRequest(2, 3, 7, follows=True),
        JoinRequest(2, 0, 0, follows=False),
        Refusal(2, RECORD),
        Unheard(2, RECORD, (0, 5)),
        Leave(2, RECORD),
    ],
)
def test_a_message_comes_as_it_was_sent(message):
    assert message_of(as_note(message), sender=2) == message


def test_a_note_counts_as_its_senders():
    assert message_of(as_note(Refusal(4, RECORD)), sender=2).sender == 2


def test_a_note_of_many_sites_fits():
    record = MembershipRecord(10**6, tuple(range(100)), 99)
    assert len(as_note(Turn(99, record, 10**9, True, True))) <= MOST_CONTENT_BYTES


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"[]",
        b"[1, 2]",
        b"[[], 2]",
        b'["Turn"]',
        b'["Refusal", 1, 2]',
        b'["Refusal", 2, [3, [0, 2], 1]]',
        b'["Refusal", 2, [3, [2, 0], 2]]',
        b'["Refusal", 2, [3, "02", 0]]',
        b'["Refusal", 2, [3, [0, 2], 2], 1]',
        b'["Turn", 2, [3, [0, 2], 2], 7, true]',
        b'["Unheard", 2, [3, [0, 2], 2], 7]',
        b'["Unheard", 2, [3, [0, 2], 2], ["7"]]',
        b'["Turn", 2, [3, [0, 2], 2], 7, true, 1]',
        b'["Turn", 2, [3, [0, 2], 2], "7", true, false]',
        b'["HandedOver", 2, [3, [0, 2], 2], 7.0, true]',
        b'["HandedOver", 2, [3, [0, 2], 2], 7, "whole"]',
        b'["JoinRequest", 2, 3, 7]',
        b'["JoinRequest", 2, 3, -1, false]',
        b'["JoinRequest", 2, true, 7, false]',
        b'["JoinRequest", 2, 3, 9007199254740992, false]',
        b'["JoinRequest", 2, 3, 7, null]',
        b'["JoinRequest", 2, [3, [0, 2], 2], 7, false]',
        b'["RestoreSave", 2]',
        b"[" * 1000,
        b"\xff",
    ],
)
def test_a_note_of_something_else_is_an_error(note):
    with pytest.raises(RunError, match="site 2 has sent a note that is none of this version"):
        message_of(note, sender=2)
