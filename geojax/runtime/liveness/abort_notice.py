"""The notice of the process that aborts the job: one note in the key-value store, for all to read.

The first that aborts is believed to be the cause; those that follow because of it change nothing.
"""

import json
from typing import NamedTuple

from geojax.runtime.jax_private import process_index_and_count
from geojax.runtime.key_value_store import publish_first, read

_KEY = "aborted"
_LONGEST_MESSAGE = 4096


class AbortNotice(NamedTuple):
    """Reason why a job ends."""

    process: int
    """Process with the error."""
    exit_code: int
    """Code with which all processes end."""
    message: str
    """Message of the error."""


def publish_abort_notice(notice: AbortNotice) -> None:
    """Publish the notice, unless another process has published one."""
    publish_first(_KEY, json.dumps(notice._replace(message=notice.message[:_LONGEST_MESSAGE])))


def read_abort_notice() -> AbortNotice | None:
    """Return the notice of the process that aborts the job; None if there is none."""
    entry = read(_KEY)
    if entry is None:
        return None
    notice = AbortNotice(*json.loads(entry))
    assert notice.process < process_index_and_count()[1], "a notice must be of a process of the job"
    return notice
