"""A store of the record that is asked in a thread, so that a slow one holds up nothing."""

import queue
import threading
import time
from collections.abc import Callable

from geojax.errors import UserError
from geojax.membership.events import MembershipEvent, RecordSeen, StoreUnreachable
from geojax.membership.record import MembershipRecord, RecordStore, UnreachableStoreError

_Request = Callable[[], MembershipRecord | None]


class AskedStore:
    """The requests to a store, one after the other.

    A request without an answer in time counts as one to a store that does not answer. The next one
    goes to the store when that one has come back.

    Args:
        store: where the record is.
        patience_seconds: longest time of a request.
    """

    def __init__(self, store: RecordStore, patience_seconds: float):
        self._store, self._patience = store, patience_seconds
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[MembershipEvent | Exception] = queue.SimpleQueue()
        self._deadline: float | None = None
        """End of the wait for an answer; None: there is no request."""
        self._waiting: _Request | None = None
        """The request that waits until a former one comes back."""
        self._is_busy = False
        # A store that never answers must not keep the process from ending.
        threading.Thread(target=self._serve, name="geojax membership", daemon=True).start()

    def read(self) -> None:
        """Read the record."""
        self._ask(self._store.read)

    def swap(self, expected: MembershipRecord, new: MembershipRecord) -> None:
        """Compare and set the record."""
        self._ask(lambda: self._store.swap(expected, new))

    def answer(self) -> MembershipEvent | None:
        """Return the next answer that has come; None: there is none.

        Raises:
            UserError: the store has something else than a record of this run.
        """
        if self._is_busy and not self._answers.empty():
            answer = self._answers.get()
            self._is_busy = False
            if self._waiting is None and self._deadline is not None:
                self._deadline = None
                if isinstance(answer, Exception):
                    raise answer
                return answer
            # Nobody waits for it any more.
            if self._waiting is not None:
                self._start(self._waiting)
        if self._deadline is None or time.monotonic() < self._deadline:
            return None
        self._deadline = self._waiting = None
        return StoreUnreachable()

    def close(self) -> None:
        """Ask nothing any more."""
        self._requests.put(None)

    def _ask(self, request: _Request) -> None:
        assert self._deadline is None, "one request at a time"
        self._deadline = time.monotonic() + self._patience
        if self._is_busy:
            self._waiting = request
        else:
            self._start(request)

    def _start(self, request: _Request) -> None:
        self._waiting, self._is_busy = None, True
        self._requests.put(request)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                record = request()
                if record is None:
                    raise UserError("islands.lease: the record of who takes part is gone")
                self._answers.put(RecordSeen(record))
            except UnreachableStoreError:
                self._answers.put(StoreUnreachable())
            except Exception as error:
                self._answers.put(error)
