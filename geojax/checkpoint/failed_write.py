"""Why a checkpoint could not be written, in one line."""

from geojax.job.exit_messages import first_line

_LONGEST = 120
"""Letters of a reason that names no files."""


def reason(error: BaseException) -> str:
    """Return the reason of a failed write in one line, without TensorStore's details and paths."""
    text: str = getattr(error, "strerror", None) or first_line(error).partition(" [")[0]
    return text if len(text) <= _LONGEST else text.rpartition(": ")[2][-_LONGEST:]
