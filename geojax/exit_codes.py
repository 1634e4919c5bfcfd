"""Exit codes of geojax's processes, from which the launcher decides what to do next.

A code above 128 is, as in a shell, 128 plus the signal that ended the process.
"""

FAILURE = 1
"""The run could not go on: it diverged, lost contact, or met something unexpected. Another try may
succeed."""

USAGE = 2
"""Bad input, which the user can correct and another try cannot."""

UNHEALTHY = 3
"""All was done, and the printed result is that something is slow or broken."""

FENCED = 4
"""The run goes on at the other sites without this one, which must not act. Started again, it
returns."""

HANG = 75
"""The watchdog ended a step that hung: EX_TEMPFAIL, worth another try."""

INTERRUPTED = 130
"""Ctrl-C."""

UNREAD = 141
"""The reader of the output went away, which ends other tools by SIGPIPE."""

STOPPED = (129, INTERRUPTED, 143)
"""Stopped on request, by SIGHUP, SIGINT or SIGTERM."""

FINAL = (USAGE, *STOPPED)
"""Another try would end alike, or nobody wants it."""

COMPLETE = (0, UNHEALTHY)
"""All was done: nothing failed."""
