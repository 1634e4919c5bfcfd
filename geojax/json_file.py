"""JSON files that come from outside."""

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

from geojax.errors import UserError

_MOST_BYTES = 1 << 28

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: Any) -> str:
    """Return a JSON value as text for a message, cut off where it is long."""
    return _SHORT.repr(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def load_text(path: Path, most_bytes: int = _MOST_BYTES) -> str:
    """Read the text in the file at `path`.

    Raises:
        UserError: it is missing, is no regular file of up to `most_bytes`, or is not UTF-8.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            raise UserError(f"{path}: must be a regular file of up to {most_bytes:,} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x})") from None


def load_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file at `path`.

    Raises:
        UserError: it cannot be read (see `load_text`), is no JSON, or holds something else.
    """
    try:
        content = json.loads(load_text(path), parse_constant=_refuse_constant)
    except RecursionError:
        raise UserError(f"{path}: not valid JSON (objects or lists too deep)") from None
    except UserError:
        raise
    except ValueError as error:  # also a number of thousands of digits
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content
