"""What a process of a run prints when it ends because of another, and how a launcher reads it.

Whoever watches the processes from outside sees several fail within seconds, in any order. These
words tell those that were brought down from the one that failed by itself.
"""

import re

_ENDING = "ending, because"
_LOST_CONTACT = "lost contact with another process of the run"


def ending_because(who: str, message: str) -> str:
    """For a process that ends because another, `who`, said that it does: "process 1 (host n17)"."""
    return f"{_ENDING} {who} ended: {message}"


def lost_contact(details: str) -> str:
    """For a process that ends because it cannot reach another.

    `details` follow at once: ": process 1 (site west, host n17) ..." or " (reason)".
    """
    return (
        f"{_LOST_CONTACT}{details}; start all of them again and the run goes on from its newest "
        "checkpoint"
    )


def blamed_process(line: str) -> int | None:
    """The process because of which the one that printed `line` ended; None where none is named."""
    found = re.search(rf"(?:{_ENDING}|{_LOST_CONTACT}:) process (\d+)\b", line)
    return int(found[1]) if found else None


def blames_another(line: str) -> bool:
    """Whether whoever printed `line` ended because of another process, known or not."""
    return _LOST_CONTACT in line or blamed_process(line) is not None
