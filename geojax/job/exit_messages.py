"""Messages of a process that ends because of another one, and how a launcher reads them.

When one process of a run fails, several end within seconds, in any order. These messages let
`geojax launch` tell the process that failed by itself from those that ended because of it.
"""

import re
from collections.abc import Sequence

NAMED_PROCESSES = 8
"""Most processes that one message names."""

_MOST_CHARACTERS = 250
_ENDING = "ending, because"
_LOST_CONTACT = "lost contact with another process of the run"

_names: dict[int, str] = {}


def register_process_names(sites: Sequence[str | None], hosts: Sequence[str]) -> None:
    """Remember the site and the host of each process, so that messages can name them."""
    _names.clear()
    for process, (site, host) in enumerate(zip(sites, hosts, strict=True)):
        _names[process] = f"process {process} ({f'site {site}, ' if site else ''}host {host})"


def describe(processes: Sequence[int], count: int | None = None) -> str:
    """Name processes in a message: "process 1 (site west, host n17) and process 3 and 5 more".

    Args:
        processes: the processes, of which the first `NAMED_PROCESSES` are named.
        count: how many there are, if `processes` are not all.
    """
    named = [_names.get(process, f"process {process}") for process in processes[:NAMED_PROCESSES]]
    more = (len(processes) if count is None else count) - len(named)
    return " and ".join(named + ([f"{more} more"] if more else []))


def ending_because(who: str, message: str) -> str:
    """Message of a process that ends because another, `who`, announced an error of its own."""
    return f"{_ENDING} {who} ended: {message}"


def lost_contact(details: str) -> str:
    """Message of a process that ends because it cannot reach another.

    Args:
        details: is appended directly: ": process 1 (site west, host n17) ..." or " (reason)".
    """
    return (
        f"{_LOST_CONTACT}{details}; start all of them again and the run goes on from its newest "
        "checkpoint"
    )


def blamed_process(line: str) -> int | None:
    """Return the process that the printed `line` names as the cause; None if it names none."""
    found = re.search(rf"(?:{_ENDING}|{_LOST_CONTACT}:) process (\d+)\b", line)
    return int(found[1]) if found else None


def blamed_of_site(line: str) -> tuple[str, int] | None:
    """Return the site, a job of its own, and the process of it that the printed `line` blames."""
    who = r"site (\S+) \(process (\d+), host \S+\)"
    lost = (
        rf"transport: (?:lost (?:the connection to|.+ from) {who}|{who} has been silent|"
        rf".+ (?:come from|fetched by) {who})"
    )
    if (found := re.search(lost, line)) is None:
        return None
    site, process = filter(None, found.groups())
    return site, int(process)


def blames_another(line: str) -> bool:
    """Return whether the printed `line` blames another process, named or not."""
    named = blamed_process(line), blamed_of_site(line)
    return _LOST_CONTACT in line or named != (None, None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut off, without the details that follow."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
