"""A store that answers late, or never."""

import threading
import time

import pytest

from geojax.errors import UserError
from geojax.islands.going_on.asked_store import AskedStore
from geojax.membership.events import RecordSeen, StoreUnreachable
from geojax.membership.record import MembershipRecord, UnreachableStoreError

FIRST = MembershipRecord(1, (0, 1, 2), 0)
SECOND = MembershipRecord(2, (0, 1), 0)


class HeldStore:
    """A store whose requests wait while it is held."""

    def __init__(self):
        self.record, self.calls = FIRST, 0
        self.is_open = threading.Event()
        self.is_open.set()
        self.error = None

    def read(self):
        self.calls += 1
        self.is_open.wait()
        if self.error is not None:
            raise self.error
        return self.record

    def swap(self, expected, new):
        self.read()
        self.record = new
        return new


@pytest.fixture
def held():
    store = HeldStore()
    yield store
    store.is_open.set()


def answer_of(asked):
    deadline = time.monotonic() + 20
    while (answer := asked.answer()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answer


def test_answers_are_events(held):
    asked = AskedStore(held, 20)
    asked.read()
    assert answer_of(asked) == RecordSeen(FIRST)
    asked.swap(FIRST, SECOND)
    assert answer_of(asked) == RecordSeen(SECOND)
    assert asked.answer() is None
    asked.close()


def test_a_store_that_hangs_does_not_answer_and_is_asked_again_when_it_is_back(held):
    asked = AskedStore(held, 0.05)
    held.is_open.clear()
    asked.swap(FIRST, SECOND)
    assert answer_of(asked) == StoreUnreachable()
    for _ in range(3):
        asked.read()
        assert answer_of(asked) == StoreUnreachable()
    assert held.calls == 1, "what hangs is not asked more"
    asked._patience = 20
    asked.read()
    held.is_open.set()
    assert answer_of(asked) == RecordSeen(SECOND), "the swap was done, late"
    assert held.calls == 2
    asked.close()


def test_an_answer_for_which_nobody_waits_is_dropped(held):
    asked = AskedStore(held, 0.05)
    held.is_open.clear()
    asked.read()
    assert answer_of(asked) == StoreUnreachable()
    held.is_open.set()
    time.sleep(0.05)
    assert asked.answer() is None
    asked.close()


@pytest.mark.parametrize("error", [UnreachableStoreError("away"), UserError("another record")])
def test_errors(held, error):
    held.error = error
    asked = AskedStore(held, 20)
    asked.read()
    if isinstance(error, UserError):
        with pytest.raises(UserError, match="another record"):
            answer_of(asked)
    else:
        assert answer_of(asked) == StoreUnreachable()
    asked.close()
