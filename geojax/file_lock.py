"""Locks of files: the kernel releases them when the process that holds one ends in any way.

A lock file may lie where others can write. A link in its place is refused and never followed, so
that nobody has a process truncate a file of its own.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from geojax.errors import UserError

_MOST_READ = 200


class LockHeldError(UserError):
    """A live process holds the lock; the message is its name and host, as it left them."""


class FileLock:
    """The lock on the file at `path`, which is made if needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self, *, wait: bool = False) -> None:
        """Take the lock, and note this process in the file.

        Args:
            wait: wait for the process that holds it.

        Raises:
            LockHeldError: another process holds it (without `wait`).
            UserError: `path` is a link, or no regular file.
            OSError: the file cannot be written.
        """
        assert self._descriptor is None, f"{self.path} is locked already"
        while True:
            descriptor = self._opened()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                holder = os.pread(descriptor, _MOST_READ, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise LockHeldError(holder or "another process") from None
            except BaseException:
                os.close(descriptor)
                raise
            # The last holder may have removed the file, and a third process may hold a new one.
            if _is_at(self.path, descriptor):
                break
            os.close(descriptor)
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # on a full disk nobody learns the name: it is locked
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        # The lock belongs to the open file: a forked worker that outlives a killed run would hold
        # it on. Closing the copy in the child leaves the parent's lock alone.
        os.register_at_fork(after_in_child=self._forget)

    @property
    def is_in_place(self) -> bool:
        """True while the lock is held and its file is at `path`: nobody has removed it."""
        return self._descriptor is not None and _is_at(self.path, self._descriptor)

    def remove(self) -> None:
        """Remove the file and release the lock."""
        self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            self.release()

    def _opened(self) -> int:
        # A pipe would be waited for. The holder's name must not be lost when the lock is refused.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP or self.path.is_symlink():
                raise UserError(
                    f"{self.path}: is a link, which a lock never follows; move it away"
                ) from None
            if error.errno in (errno.EISDIR, errno.ENXIO, errno.ENODEV):
                raise UserError(
                    f"{self.path}: is {_kind(self.path)}, but a lock belongs there; move it away"
                ) from None
            raise
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(descriptor)
            what = "a link" if stat.S_ISREG(status.st_mode) else _kind(self.path)
            raise UserError(f"{self.path}: is {what}, but a lock belongs there; move it away")
        return descriptor


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "no regular file"


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
