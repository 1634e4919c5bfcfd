"""Agreement of the processes of a run before any of them acts on a checkpoint."""

import jax
import numpy as np
from jax.experimental import multihost_utils

_TEXT_BYTES = 512


def number_of_first_process(number: int) -> int:
    """Return process 0's `number` on every process (32 bits)."""
    if jax.process_count() == 1:
        return number
    return int(np.asarray(multihost_utils.process_allgather(np.int32(number))).reshape(-1)[0])


def first_text(text: str | None) -> str | None:
    """Return the `text` of the first process that has one, on every process; None if none has.

    So a problem of one process leads to the same decision everywhere, and the others do not wait
    for it at a barrier. The text is cut after 512 bytes.
    """
    if jax.process_count() == 1:
        return text
    own = np.zeros(_TEXT_BYTES, np.uint8)
    encoded = np.frombuffer((text or "").encode()[:_TEXT_BYTES], np.uint8)
    own[: encoded.size] = encoded
    for row in np.asarray(multihost_utils.process_allgather(own)).reshape(-1, _TEXT_BYTES):
        if row.any():
            return row[row != 0].tobytes().decode(errors="ignore")
    return None
