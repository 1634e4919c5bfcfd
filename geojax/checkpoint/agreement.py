"""Agreement of the processes of a run before any of them acts on a checkpoint."""

import jax
import numpy as np
from jax.experimental import multihost_utils

_TEXT_BYTES = 512
_SHORTEST = 1 << 16


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


def text_of(process: int, text: str) -> str:
    """Return the `text` of one process on every process; it may be long, and costs O(N)."""
    if jax.process_count() == 1:
        return text
    is_source = jax.process_index() == process
    encoded = np.frombuffer(text.encode() if is_source else b"", np.uint8)
    send = multihost_utils.broadcast_one_to_all
    size = int(send(np.int32(encoded.size), is_source=is_source))
    # Every length is a program to compile: most texts fit the shortest.
    padded = np.zeros(max(_SHORTEST, 1 << (size - 1).bit_length()), np.uint8)
    padded[: encoded.size] = encoded
    return bytes(np.asarray(send(padded, is_source=is_source))[:size]).decode()
