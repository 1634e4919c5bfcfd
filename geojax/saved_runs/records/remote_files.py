"""Files of a run directory on another host, read by one ssh with its standard programs."""

import base64
import binascii
import re
import shlex
import subprocess
from collections.abc import Sequence

from geojax.errors import RunError, UserError
from geojax.saved_runs.records.run_files import FileMark, is_of_run

_END = "=end="
_MARK = re.compile(r"(\d{1,19}) (\d{1,19}) (?:\./)?(.+)")
_STATE = 'stat -L -c "%s %Y %n"'


class RemoteFiles:
    """Files of a run directory on a host that ssh reaches.

    One connection serves all reads: a shell there takes a command and answers in lines. Nothing is
    written there.

    Args:
        host: as ssh knows it, such as `me@east1`.
        folder: path of the directory there; ~ is the home folder there.
        ssh: the words of the ssh command.
    """

    def __init__(self, host: str, folder: str, ssh: Sequence[str] = ("ssh",)) -> None:
        self._host = host
        try:
            self._shell = subprocess.Popen(
                [*ssh, host, "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise UserError(f"ssh cannot be run ({error.strerror}); install it") from None
        assert self._shell.stdin is not None, "a pipe"
        assert self._shell.stdout is not None, "a pipe"
        self._commands, self._answers = self._shell.stdin, self._shell.stdout
        self._folder = _quoted_folder(folder)

    def marks(self) -> dict[str, FileMark]:
        """Return the files that tell of the run; none before it has begun."""
        lines = self._ask(
            f"cd -- {self._folder} 2>/dev/null && "
            f"{_STATE} ./*.jsonl ./*.json ./*.yaml */*.jsonl */*.json */*.yaml 2>/dev/null"
        )
        found = {}
        for line in lines:
            matched = _MARK.fullmatch(line.decode(errors="replace"))
            if matched is not None and is_of_run(matched[3]):
                found[matched[3]] = FileMark(int(matched[1]), int(matched[2]))
        return found

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer at the end of the file, or if it is gone."""
        return self._content(f"tail -c +{offset + 1} -- {self._path(name)} | head -c {length}")

    def lines_with(self, name: str, text: bytes, most: int) -> bytes:
        """Return the last `most` lines of a file that hold `text`."""
        wanted = shlex.quote(text.decode())
        return self._content(f"grep -a -F -e {wanted} -- {self._path(name)} | tail -n {most}")

    def _path(self, name: str) -> str:
        assert is_of_run(name), f"{name} is no file of a run"
        return f"{self._folder}/{shlex.quote(name)}"

    def _content(self, command: str) -> bytes:
        lines = self._ask(f"{{ {command}; }} 2>/dev/null | base64")
        try:
            return base64.b64decode(b"".join(lines), validate=True)
        except binascii.Error:
            return b""

    def _ask(self, command: str) -> list[bytes]:
        """Run a command in a subshell there and return the lines that it prints.

        Raises:
            RunError: the connection is gone.
        """
        try:
            self._commands.write(f"({command})\necho {_END}\n".encode())
            self._commands.flush()
        except OSError:
            raise self._lost() from None
        lines: list[bytes] = []
        while (line := self._answers.readline()) != f"{_END}\n".encode():
            if not line:
                raise self._lost()
            lines.append(line.rstrip(b"\n"))
        return lines

    def _lost(self) -> RunError:
        return RunError(
            f"{self._host}: ssh ended with exit code {self._shell.wait()}; see its message, and "
            f"try ssh {self._host}"
        )

    def close(self) -> None:
        """End the connection."""
        self._shell.terminate()
        self._shell.wait()


def _quoted_folder(folder: str) -> str:
    """Quote a path for a shell, which may expand a ~ at its beginning."""
    home, slash, rest = folder.partition("/")
    if re.fullmatch(r"~[A-Za-z0-9_.-]*", home):
        return f"{home}{slash}{shlex.quote(rest) if rest else ''}"
    return shlex.quote(folder if folder.startswith("/") else f"./{folder}")
