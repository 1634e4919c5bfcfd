"""Paths that people give, in configs and as options: one rule for all of them.

`~` and `~user` are home folders. Variables are the shell's business and are refused, because a
folder called `${HOME}` helps nobody. A path is resolved once, when it is read: it becomes absolute,
without `..`, `.` and `//`, and links to folders are followed. A link to a file stays: its
neighbors are those of the link, as in the cache of the Hugging Face hub.
"""

import errno
import os
import re
import unicodedata
from pathlib import Path
from typing import Annotated, Any

import pydantic

from geojax.errors import UserError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")
_VARIABLE = re.compile(r"(?:^|/)(\$(?:\w+|\{\w+\}))")
_MOST_SHOWN = 80


def expanded_path(path: str | Path) -> Path:
    """Replace the `~` or `~user` that `path` begins with by the home folder.

    Raises:
        UserError: the path is empty, holds a control character, begins a part with a variable,
            or names a user without a home folder.
    """
    text = str(path) if isinstance(path, Path) else path
    if not text:
        raise UserError("the path is empty; . would be the current folder")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise UserError(f"'{_shown(text)}' holds a control character; a path has none")
    if (variable := _VARIABLE.search(text)) is not None:
        raise UserError(
            f"'{_shown(text)}' holds the variable {_shown(variable[1])}, which geojax does not "
            "expand; write its value, or ~ for your home folder"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise UserError(
            f"'{_shown(text)}': {_shown(user)} has no home folder here; write the folder's path"
        ) from None


def resolved_path(path: str | Path) -> Path:
    """Expand `path` and make it absolute, without `..`, `.`, `//` and links to folders.

    Raises:
        UserError: see `expanded_path`; or it is a URL, leads through a circle of links, or is
            relative to a folder that was removed.
    """
    if _URL.match(str(path)):
        raise UserError(
            f"{_shown(str(path))} is a URL; give the path of a file system that is mounted here"
        )
    expanded = expanded_path(path)
    if _is_in_a_circle(expanded):
        raise UserError(f"'{_shown(str(path))}' leads through a circle of links")
    try:
        parent = expanded.parent.resolve()
        resolved = parent / expanded.name
        if not expanded.name or expanded.name == ".." or _is_folder(resolved):
            resolved = expanded.resolve()
    except FileNotFoundError:
        raise UserError(
            f"'{_shown(str(path))}' is relative to the current folder, which has been removed"
        ) from None
    return resolved


def shown_path(path: Path) -> str:
    """Make a path relative to the current folder, if it lies below."""
    try:
        below = path.resolve().is_relative_to(Path.cwd())
    except OSError:  # the current folder has been removed
        below = False
    return os.path.relpath(path) if below else str(path)


def _is_in_a_circle(path: Path) -> bool:
    """Return True if links on the way lead to each other, which `resolve` says up to 3.12 only."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a folder on the way may not be entered, or a name is too long
        return False


def _shown(text: str) -> str:
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 3]}..."


def _read(value: Any) -> Any:
    return resolved_path(value) if isinstance(value, str | Path) else value


ResolvedPath = Annotated[Path, pydantic.BeforeValidator(_read)]
"""A path in a config, which is resolved when the config is read."""


def write_atomically(path: Path, content: str, *, durable: bool = True) -> None:
    """Write a text file that is either there as a whole or as it was.

    Args:
        path: the file.
        content: its text.
        durable: that holds if the machine dies, too; else if processes do.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)
