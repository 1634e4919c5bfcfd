"""The record of who takes part, in a file: for tests, and for disks that all sites share."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from geojax.errors import UserError
from geojax.file_lock import FileLock
from geojax.membership.record import MembershipRecord, UnreachableStoreError, swapped
from geojax.membership.record_file import MOST_BYTES, decode_record, encode_record


class FileRecordStore:
    """A record in the file at `path`, for the run named `run`.

    A lock beside the file lets one process at a time compare and set. The new record is complete
    on disk before it takes the place of the former.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run

    def read(self) -> MembershipRecord | None:
        """Return the record; None: there is none yet.

        Raises:
            UserError: the file holds something else than a record of this run.
            UnreachableStoreError: its folder cannot be read.
        """
        with self._reached():
            if not self.path.parent.is_dir():
                raise UnreachableStoreError(f"{self.path.parent}: no such folder")
            if not os.path.lexists(self.path):
                return None
            if not self.path.is_file():
                raise UserError(f"{self.path}: no regular file; move it away")
            with self.path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        return decode_record(content, self.run, str(self.path))

    def create(self, record: MembershipRecord) -> MembershipRecord:
        """Write the first record unless there is one, and return the one that is there then.

        Raises:
            UserError: the file holds something else than a record of this run.
            UnreachableStoreError: the folder cannot be read or written.
        """
        with self._locked():
            current = self.read()
            if current is None:
                self._write(record)
            return record if current is None else current

    def swap(self, expected: MembershipRecord, new: MembershipRecord) -> MembershipRecord:
        """Replace `expected` by `new`, and return the record that is there then.

        Raises:
            UserError: the record is gone, or is not of this run.
            UnreachableStoreError: the folder cannot be read or written.
        """
        with self._locked():
            current = self.read()
            if current is None:
                raise UserError(
                    f"{self.path}: the record of who takes part is gone; end the run at all sites "
                    "and start it again"
                )
            result = swapped(current, expected, new)
            if result != current:
                self._write(result)
            return result

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.path.with_name(f"{self.path.name}.lock"))
        with self._reached():
            lock.take(wait=True)
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnreachableStoreError(
                f"{self.path}: the record of who takes part cannot be reached ({error.strerror})"
            ) from error

    def _write(self, record: MembershipRecord) -> None:
        with self._reached():
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(encode_record(record, self.run))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
