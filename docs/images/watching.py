"""Draw watch.png, report.png and report-faults.png in docs/images, of the run of watched_run.py.

PYTHONPATH=. python docs/images/watching.py runs/two-sites     # needs chromium
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.image
import numpy as np
from rich.console import Console
from rich.terminal_theme import MONOKAI

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


def draw_watch(runs: Path, folder: Path) -> None:
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


def draw_report(runs: Path, folder: Path) -> None:
    page, image = folder / "report.html", folder / "report.png"
    assert run(["report", str(runs), "--output", str(page)]) == 0
    photograph(page, image, 1240, 4000)
    pixels = matplotlib.image.imread(image)[:, :, :3]
    titles = re.findall("<h2[^>]*>([^<]*)</h2>", page.read_text())
    # A section begins with a line over the whole width.
    middle = pixels[:, 40:-40]
    is_rule = (middle == middle[:, :1]).all(axis=(1, 2)) & (middle[:, 0] < 1).all(axis=1)
    begins = dict(zip(titles, np.flatnonzero(is_rule), strict=True))
    matplotlib.image.imsave(IMAGES / "report.png", pixels[: begins["Links between sites"]])
    faults = slice(begins["Attempts and events"] + 1, begins["Plan against measurement"])
    matplotlib.image.imsave(IMAGES / "report-faults.png", pixels[faults])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        draw_watch(Path(sys.argv[1]), Path(name))
        draw_report(Path(sys.argv[1]), Path(name))
