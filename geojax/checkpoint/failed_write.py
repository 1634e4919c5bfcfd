"""Why a checkpoint could not be written, in one line."""

_LONGEST = 120
"""Letters of a reason that names no files."""


def reason(error: BaseException) -> str:
    """Return the reason of a failed write in one line, without TensorStore's details and paths."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    text: str = getattr(error, "strerror", None) or line.partition(" [")[0]
    # The reason comes last, behind the files.
    return text if len(text) <= _LONGEST else text.rpartition(": ")[2][-_LONGEST:]
