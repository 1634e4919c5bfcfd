"""Errors with a message for the user."""

import errno
from collections.abc import Sequence

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if a full disk or quota caused `error`, which so says nothing about the input."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


class UserError(ValueError):
    """Bad input from outside: a config, a topology, a layout, data or a checkpoint.

    The message is one line: where, what is wrong, and what would be right. The `geojax` command
    prints it without a traceback and exits with code 2, or with 1 if a full disk is the cause. A
    library user sees a `ValueError`.
    """

    @property
    def problem(self) -> str:
        """The message without what would be right, which may be another command's option."""
        return str(self).partition(";")[0]

    @property
    def lines(self) -> tuple[str, ...]:
        """The message, a line for each mistake."""
        return (str(self),)


class MistakesError(UserError):
    """The mistakes of a config, each a line of the message."""

    def __init__(self, lines: Sequence[str]):
        super().__init__("\n".join(lines))
        self._lines = tuple(lines)

    @property
    def lines(self) -> tuple[str, ...]:
        """The mistakes."""
        return self._lines


class RunError(RuntimeError):
    """A run that began well and cannot go on: it diverged, or lost contact with a process.

    The message says what happened and what is left. The `geojax` command prints it without a
    traceback and exits with code 1.
    """


class LostContactError(RunError):
    """Another process of the run is gone, so that waiting for it would never end."""


class FencedError(RunError):
    """The run goes on at the other sites without this one.

    The `geojax` command exits with code 4.
    """


class MissingProcessesError(RunError):
    """Some processes did not arrive in time, which another try may cure.

    Attributes:
        missing: the indices of those processes.
    """

    def __init__(self, message: str, missing: Sequence[int]):
        super().__init__(message)
        self.missing = tuple(missing)
