"""A file that grows by whole records, whatever becomes of its disk."""

import contextlib
import os
from pathlib import Path


class AppendedFile:
    """The file at `path`, which holds whole records after any failed write.

    After a failure the file is opened anew for the next record, and so is one that somebody has
    removed: the disk may have space again, or the server of its file system may be back.

    Args:
        path: the file; what it holds already stays.
        head: first bytes of a file that is empty.
    """

    def __init__(self, path: Path, head: bytes = b""):
        self.path, self._head = path, head
        self._descriptor: int | None = None
        self._size: int | None = None

    def append(self, record: bytes) -> None:
        """Write `record` at the end, or nothing of it.

        Raises:
            OSError: it cannot be written.
        """
        try:
            descriptor, size = self._opened()
            if not size:
                record = self._head + record
            written = 0
            while written < len(record):
                written += os.write(descriptor, record[written:])
        except OSError:
            self._give_up()
            raise
        self._size = size + len(record)

    def close(self) -> None:
        """Close the file; the next record opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _opened(self) -> tuple[int, int]:
        """Open the file, if need be, without the part of a record behind the last whole one."""
        if self._descriptor is not None and self._size is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                    return self._descriptor, self._size
            self.close()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o666)
        found = os.fstat(self._descriptor).st_size
        if self._size is not None and found > self._size:
            os.ftruncate(self._descriptor, self._size)
            found = self._size
        self._size = found
        return self._descriptor, found

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            if self._descriptor is not None and self._size is not None:
                os.ftruncate(self._descriptor, self._size)
        with contextlib.suppress(OSError):
            self.close()
