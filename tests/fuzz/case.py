"""A case of the fuzz: a command line with the files and the environment that it meets."""

import dataclasses
import os
import socket
from pathlib import Path

KINDS = ("fifo", "folder", "circle", "socket", "huge", "empty", "unreadable")
"""Kinds of a file that are no file of text."""


@dataclasses.dataclass
class Case:
    """A command line with the files and the environment that it meets."""

    arguments: list[str]
    """Words after `geojax`; {work} stands for the case's folder."""
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    must_be_refused: bool = False
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    """Files that are something else, of `KINDS`, in place of the one of their name."""
    held: tuple[str, ...] = ()
    """Files that another process has locked."""
    writes: tuple[str, ...] = ()
    """Folders that a command may write into although it refuses its input."""
    notes: bool = False
    """The command says what it does, in lines before the error."""

    def write(self, folder: Path) -> None:
        """Write the case's files into `folder`, and a few kinds that every case may name."""
        for name, content in self.files.items():
            if name not in self.kinds:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        always = {"fifo": "fifo", "folder": "folder", "empty.yaml": "empty", "circle": "circle"}
        always |= {"socket": "socket", "huge.yaml": "huge"}
        for name, kind in (always | self.kinds).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _make(path, kind)

    def __str__(self) -> str:
        words = " ".join(word if len(word) <= 90 else f"{word[:87]}..." for word in self.arguments)
        sizes = {name: len(content) for name, content in self.files.items()}
        shown = dict(list(sizes.items())[:8])
        more = f" and {len(sizes) - 8} more files" if len(sizes) > 8 else ""
        others = "".join(f" {each}" for each in (self.environment, self.kinds, self.held) if each)
        return f"geojax {words!r} {shown or ''}{more}{others}"


def _make(path: Path, kind: str) -> None:
    """Make a file of one of `KINDS`."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "circle":
        path.symlink_to(path.name)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:  # a path may be too long for its address
            here = os.open(path.parent, os.O_RDONLY)
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(2**30)
    elif kind == "empty":
        path.touch()
    else:
        assert kind == "unreadable", kind
        path.write_bytes(b"\xff" * 100)
        path.chmod(0)
