"""`geojax watch RUN`: a live view of a run, from the files of its directory."""

import collections
import dataclasses
import os
import time
from typing import Annotated

import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text

from geojax.cli.escaping import escaped
from geojax.cli.watch_view import Size, event_text, run_view, step_line
from geojax.errors import UserError
from geojax.exit_codes import INTERRUPTED
from geojax.network_names import checked_ssh_host
from geojax.paths import resolved_path
from geojax.saved_runs.records.remote_files import RemoteFiles
from geojax.saved_runs.records.run_files import LocalFiles, RunFiles
from geojax.saved_runs.records.run_record import LIVE, RunRecord
from geojax.saved_runs.records.step_record import StepRecord

_POLL_SECONDS = 1.0
_FIRST_LINES = 10
_REMEMBERED_LINES = 1000


@dataclasses.dataclass(frozen=True)
class WatchCommand:
    """Watch a run: loss, speed, links, sites, saves and events, as its directory tells them.

    The view ends when the run does, and Ctrl-C ends it earlier. Without a terminal it is a line for
    each step. Nothing is written, and the run notices nothing.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN|HOST:RUN")]
    """Directory of a run, or of one of its islands; HOST:RUN is one on a host that ssh reaches."""

    once: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the view once, and end."""


def run(command: WatchCommand) -> int:
    """Watch the run until it ends, and return the exit code: 0, or 130 after Ctrl-C."""
    files = open_files(command.run)
    try:
        record = RunRecord(files, LIVE)
        record.poll()
        console = Console(highlight=False, markup=False, emoji=False)
        if command.once:
            _print_once(record, command.run, console)
        elif console.is_terminal:
            _show(record, command.run, console)
        else:
            _print_lines(record, command.run, console)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        files.close()
    return 0


def open_files(run: str) -> RunFiles:
    """Open the directory of a run, which need not be there yet.

    Raises:
        UserError: it is no path, or is on no host.
    """
    host, colon, folder = run.partition(":")
    if not colon or "/" in host or os.path.lexists(run):
        try:
            return LocalFiles(resolved_path(run))
        except UserError as error:
            raise UserError(f"geojax watch: RUN: {error}") from None
    try:
        checked_ssh_host(host)
    except ValueError as error:
        raise UserError(f"geojax watch: RUN: {error}") from None
    if not folder:
        raise UserError(f"geojax watch: RUN: {run} names no directory; HOST:RUN would name one")
    return RemoteFiles(host, folder)


def _absence(name: str) -> str:
    return f"{escaped(name)}: no run is there yet"


def _print_once(record: RunRecord, name: str, console: Console) -> None:
    if not record.is_there:
        raise UserError(f"{_absence(name)}; name its run_directory")
    size = Size(console.width, None)
    console.print(run_view(record, name, size, is_unicode=_is_unicode(console)))


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().replace("-", "").startswith("utf")


def _show(record: RunRecord, name: str, console: Console) -> None:
    """Show the run on the whole terminal, and its last state below the prompt."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            size = Size(*console.size)
            if record.is_there:
                live.update(
                    run_view(record, name, size, is_unicode=_is_unicode(console)), refresh=True
                )
            else:
                live.update(Text(f"{_absence(name)}; waiting for it"), refresh=True)
            if record.main.has_ended:
                break
            time.sleep(_POLL_SECONDS)
            record.poll()
    _print_once(record, name, console)


def _print_lines(record: RunRecord, name: str, console: Console) -> None:
    """Print a line for each step as it comes, and for each event, until the run ends."""
    if not record.is_there:
        console.print(f"{_absence(name)}; waiting for it", soft_wrap=True)
    is_first, printed = True, _Printed()
    while True:
        main = record.main
        steps = [each for each in main.new_steps if printed.is_new(each)]
        events = [event_text(event).plain for event in main.new_events]
        lines = [step_line(each, main.steps) for each in steps]
        if is_first and (lines or events):
            lines, events, is_first = lines[-_FIRST_LINES:], events[-_FIRST_LINES:], False
        for line in [*events, *lines]:
            console.print(line, soft_wrap=True)
        main.new_steps.clear()
        main.new_events.clear()
        if main.has_ended:
            break
        time.sleep(_POLL_SECONDS)
        record.poll()


class _Printed:
    """The last lines that were printed: a resume writes the file anew, which is then read again."""

    def __init__(self) -> None:
        self._keys: collections.OrderedDict[int, None] = collections.OrderedDict()

    def is_new(self, record: StepRecord) -> bool:
        """Return True for a line that was not printed, and remember it."""
        key = hash((record.step, tuple(record.values.items())))
        if key in self._keys:
            return False
        self._keys[key] = None
        if len(self._keys) > _REMEMBERED_LINES:
            self._keys.popitem(last=False)
        return True
