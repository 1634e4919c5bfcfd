"""Draw watch.png, report.png and report-faults.png in docs/images, of a run that nobody trained.

    PYTHONPATH=.:tests python docs/images/watching.py     # needs chromium

The run is `tests/support/synthetic_runs.py`: two sites, two kills, a slow link, a failed save. Its
figures are invented.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import matplotlib.image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from support.synthetic_runs import write_run

from geojax.cli.main import run
from geojax.cli.report_plots import last_moment
from geojax.cli.watch_view import Size, run_view
from geojax.saved_runs.records.run_files import LocalFiles
from geojax.saved_runs.records.run_record import LIVE, RunRecord

IMAGES = Path(__file__).parent
COLUMNS, LINES = 160, 30
PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>
body {{ background: {background}; color: {foreground}; margin: 12px 16px; }}
pre {{ font: 13px/1.22 "DejaVu Sans Mono", monospace; }}
/* The font has no braille. */
i {{ display: inline-block; width: 1ch; font-style: normal; }}
{stylesheet}</style><pre>{code}</pre>"""


def photograph(page: Path, image: Path, width: int, height: int) -> None:
    with tempfile.TemporaryDirectory() as profile:
        words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        words += [f"--screenshot={image}", page.as_uri()]
        subprocess.run(words, check=True, capture_output=True)


def draw_watch(folder: Path) -> None:
    runs = write_run(folder / "two-sites", steps=1100)
    record = RunRecord(LocalFiles(runs), LIVE)
    record.poll()
    console = Console(
        width=COLUMNS, record=True, force_terminal=True, file=(folder / "log").open("w")
    )
    now = last_moment(record.main) + 2
    console.print(run_view(record, "runs/two-sites", Size(COLUMNS, LINES), now=now))
    page = folder / "watch.html"
    html = console.export_html(theme=MONOKAI, code_format=PAGE)
    page.write_text(re.sub("([\u2800-\u28ff])", r"<i>\1</i>", html), encoding="utf-8")
    photograph(page, IMAGES / "watch.png", 1300, 540)


def draw_report(folder: Path) -> None:
    page, image = folder / "report.html", folder / "report.png"
    assert (
        run(["report", str(write_run(folder / "whole" / "two-sites")), "--output", str(page)]) == 0
    )
    photograph(page, image, 1240, 3200)
    pixels = matplotlib.image.imread(image)
    matplotlib.image.imsave(IMAGES / "report.png", pixels[:850])
    matplotlib.image.imsave(IMAGES / "report-faults.png", pixels[2085:2975])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        draw_watch(Path(name))
        draw_report(Path(name))
