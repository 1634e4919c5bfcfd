"""A lock on a folder, which the kernel releases when the process that holds it ends in any way."""

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from geojax.errors import UserError


class FolderLock:
    """The lock file at `path`, in the folder that it keeps a second run out of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def take(self) -> "FolderLock":
        """Take the lock.

        Raises:
            UserError: a live process holds it, and the message names the process and its host; or
                the file cannot be written.
        """
        assert self._file is None, f"{self.path} is locked already"
        if self.path.exists() and not self.path.is_file():
            kind = "a folder" if self.path.is_dir() else "no regular file"
            raise UserError(f"{self.path}: is {kind}, but a run keeps its lock there; move it away")
        try:
            # Opened for appending: the holder's name must not be lost when the lock is refused.
            file = self.path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); a run needs a directory in "
                "which it may write"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"{self.path.parent}: is in use by {holder}; wait for it or use another run "
                "directory"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file
        # The lock belongs to the open file: a forked worker that outlives a killed run would hold
        # it on. Closing the copy in the child leaves the parent's lock alone.
        os.register_at_fork(after_in_child=file.close)
        return self

    @property
    def is_in_place(self) -> bool:
        """True while the file that is locked is the one at `path`: nobody has removed it."""
        assert self._file is not None, f"{self.path} must be locked"
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if self._file is not None:
            self._file.close()
            self._file = None
