"""`geojax report RUN`: a page of a run's figures and plots, from the files of its directory."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from geojax.cli.escaping import escaped
from geojax.cli.report_page import page
from geojax.cli.report_plots import ReportedRun
from geojax.cli.svg_plot import BLUE, VERMILION
from geojax.errors import UserError
from geojax.paths import write_atomically
from geojax.quantities import quantity
from geojax.saved_runs.records.run_record import RunRecord


@dataclasses.dataclass(frozen=True)
class ReportCommand:
    """Write a page of a run: loss, speed, links, faults, goodput, and the plan beside them.

    With two runs the page has both side by side, and what differs. It is one HTML file, which loads
    nothing from elsewhere. The runs may go on meanwhile.
    """

    run: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN]")]
    """Directories of one run, or of two."""

    output: Path = Path("report.html")
    """HTML file to write."""


def run(command: ReportCommand) -> int:
    """Write the page, say where it is, and return the exit code 0.

    Raises:
        UserError: there is no run, or more than two, or the page cannot be written.
    """
    if len(command.run) not in (1, 2):
        count = len(command.run)
        raise UserError(f"geojax report: RUN: {count} directories; give one, or two to compare")
    if command.output.exists() and not command.output.is_file():
        raise UserError(f"--output {command.output}: is no file; name one, such as report.html")
    names = _names(command.run)
    runs = [
        ReportedRun(name, color, RunRecord.read(folder))
        for name, color, folder in zip(names, (BLUE, VERMILION), command.run, strict=False)
    ]
    html = page(runs, time.time())
    try:
        write_atomically(command.output, html)
    except OSError as error:
        raise UserError(
            f"--output {command.output}: cannot be written ({error.strerror})"
        ) from None
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    size = quantity(len(html.encode()), "B")
    console.print(f"{escaped(str(command.output))}: {size}, to be opened in a browser")
    return 0


def _names(folders: tuple[Path, ...]) -> list[str]:
    """Return the shortest names of directories that tell them apart."""
    if len({folder.name for folder in folders}) == len(folders):
        return [folder.name or str(folder) for folder in folders]
    return [f"{folder.parent.name}/{folder.name}" for folder in folders]
