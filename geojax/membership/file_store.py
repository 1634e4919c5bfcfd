"""The record of who takes part, in a file: for tests, and for disks that all sites share."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from geojax.errors import UserError
from geojax.file_lock import FileLock
from geojax.json_file import load_json, shown
from geojax.membership.record import MembershipRecord, UnreachableStoreError, swapped

_FORMAT = "geojax-membership-1"


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
            # A disk that fails is an event of the world; content that is wrong is not.
            self.path.open("rb").close()
        return self._record(load_json(self.path))

    def create(self, record: MembershipRecord) -> MembershipRecord:
        """Write the first record unless there is one, and return the one that is there then."""
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
        content = {"format": _FORMAT, "run": self.run, **record._asdict()}
        with self._reached():
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(content, file)
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

    def _record(self, content: dict[str, Any]) -> MembershipRecord:
        if content.get("format") != _FORMAT:
            self._refuse("format", content.get("format"), f'"{_FORMAT}"')
        if content.get("run") != self.run:
            self._refuse("run", content.get("run"), f"{self.run!r}, or give this run another file")
        membership_id, holder = content.get("membership_id"), content.get("holder")
        members = content.get("members")
        if not _is_number(membership_id) or membership_id < 1:
            self._refuse("membership_id", membership_id, "an integer from 1 on")
        if (
            not isinstance(members, list)
            or not members
            or not all(_is_number(site) and site >= 0 for site in members)
            or members != sorted(set(members))
        ):
            self._refuse("members", members, "numbers of sites in ascending order")
        if not _is_number(holder) or holder not in members:
            self._refuse("holder", holder, "one of its members")
        return MembershipRecord(membership_id, tuple(members), holder)

    def _refuse(self, key: str, value: object, right: str) -> NoReturn:
        raise UserError(f"{self.path}: {key} is {shown(value)}; it must be {right}")


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
