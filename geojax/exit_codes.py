"""What the processes of geojax end with; the launcher reads from it what shall happen next.

A code above 128 is, as in a shell, 128 and the signal that ended the process.
"""

FAILURE = 1
"""The run could not go on: it diverged, lost contact, or met something unexpected. Another try may
succeed."""

MISTAKE = 2
"""Bad input, which the user can mend and another try cannot."""

VERDICT = 3
"""All was done, and the answer, which was printed, is a bad one: something is slow or broken."""

HANGING = 75
"""The watchdog ended a step that hung: EX_TEMPFAIL, worth another try."""

INTERRUPTED = 130
"""Ctrl-C."""

STOPPED = (129, INTERRUPTED, 143)
"""Somebody asked for the end: SIGHUP, SIGINT, SIGTERM."""

COMPLETE = (0, VERDICT)
"""All was done: nothing failed."""
