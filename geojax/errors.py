"""The errors that speak to the person who runs geojax."""


class UserError(ValueError):
    """Bad input from outside: a config, a topology, a layout, data, a checkpoint.

    The message is one line that says what is wrong, where, and what would be right. The `geojax`
    command prints it without a traceback and exits with code 2; a library user sees a `ValueError`.
    """


class RunError(RuntimeError):
    """A run that began well and cannot go on: diverged, or out of contact with its peers.

    The message says what happened and what is left. The `geojax` command prints it without a
    traceback and exits with code 1.
    """


class LostContactError(RunError):
    """Another process of the run has gone, and nothing that waits for it will ever end."""
