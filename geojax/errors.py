"""The one exception that means: the person who runs geojax can mend this."""


class UserError(ValueError):
    """Bad input from outside: a config, a topology, a layout, data, a checkpoint.

    The message is one line that says what is wrong, where, and what would be right. The `geojax`
    command prints it without a traceback and exits with code 2; a library user sees a `ValueError`.
    """
