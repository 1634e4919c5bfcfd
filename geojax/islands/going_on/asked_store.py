"""A store of the record that is asked in a thread, so that a slow one holds up nothing."""

import queue
import threading
from collections.abc import Callable

from geojax.errors import UserError
from geojax.membership.events import MembershipEvent, RecordSeen, StoreUnreachable
from geojax.membership.record import MembershipRecord, RecordStore, UnreachableStoreError

_Request = Callable[[], MembershipRecord | None]


class AskedStore:
    """The requests to a store, one after the other.

    Args:
        store: where the record is.
    """

    def __init__(self, store: RecordStore):
        self._store = store
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[MembershipEvent | Exception] = queue.SimpleQueue()
        # A store that never answers must not keep the process from ending.
        threading.Thread(target=self._serve, name="geojax membership", daemon=True).start()

    def read(self) -> None:
        """Read the record."""
        self._requests.put(self._store.read)

    def swap(self, expected: MembershipRecord, new: MembershipRecord) -> None:
        """Compare and set the record."""
        self._requests.put(lambda: self._store.swap(expected, new))

    def answer(self) -> MembershipEvent | None:
        """Return the next answer that has come; None: there is none.

        Raises:
            UserError: the store has something else than a record of this run.
        """
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Ask nothing any more."""
        self._requests.put(None)

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
