"""A lock on a folder, which keeps a second run out of it."""

from geojax.errors import UserError
from geojax.file_lock import FileLock, LockHeldError


class FolderLock(FileLock):
    """The lock file at `path`, in the folder that it keeps a second run out of."""

    def take(self, *, wait: bool = False) -> None:
        """Take the lock.

        Raises:
            LockHeldError: a live process holds it, and the message names the process and its host.
            UserError: the file cannot be written, or something else is in its place.
        """
        try:
            super().take(wait=wait)
        except LockHeldError as held:
            raise LockHeldError(
                f"{self.path.parent}: is in use by {held}; wait for it or use another run directory"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); a run needs a directory in "
                "which it may write"
            ) from None
