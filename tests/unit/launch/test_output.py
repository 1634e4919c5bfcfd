"""Lines of workers as `geojax launch` shows them."""

import io

import rich.console

from geojax.launch.output import _PROGRESS, Output
from geojax.launch.workers import Worker
from geojax.train.report import Progress

EAST, WEST = (Worker(number, site, (), {}) for number, site in enumerate(("east", "west")))


def test_one_line_of_progress_shows_all_sites_while_the_first_goes_on():
    shown = io.StringIO()
    output = Output((EAST, WEST), shown, shown, merges_progress=True)
    for worker, text in (
        (WEST, "step 1/9  loss 5"),  # the first site has told nothing yet
        (EAST, "step 1/9  loss 5"),
        (WEST, "step 2/9  loss 4"),
        (WEST, "step 2: validation loss 4 on 'python'"),
        (EAST, "step 2/9  loss 4"),
        *((WEST, f"step {step}/9  loss 3") for step in range(3, 6)),
    ):
        output.line(worker, text, error=False)
    assert shown.getvalue().splitlines() == [
        "west/1 | step 1/9  loss 5",
        "east/0 | step 1/9  loss 5",
        "west/1 | step 2: validation loss 4 on 'python'",
        "east/0 | step 2/9  loss 4",
        "west/1 | step 5/9  loss 3",  # the first site is silent
    ]
    assert output.last_lines(WEST)[-1] == "step 5/9  loss 3"


def test_lines_of_any_program_are_shown():
    shown = io.StringIO()
    output = Output((EAST, WEST), shown, shown)
    for worker in (EAST, WEST):
        output.line(worker, "step 1/9  mine", error=False)
    assert len(shown.getvalue().splitlines()) == 2


def test_a_run_writes_progress_as_it_is_recognized():
    text = io.StringIO()
    progress = Progress(rich.console.Console(file=text, soft_wrap=True), 10, 0, 0, 80)
    progress.update(1, 8, ["loss 5.0000", "2 s a step"])
    progress.update(10, 80, ["loss 4.0000", "2 s a step"])
    first, last = text.getvalue().splitlines()
    assert _PROGRESS.match(first)
    assert first.startswith("step 1/10  loss 5.0000  2 s a step  ")
    assert first.endswith(" left")
    assert last == "step 10/10  loss 4.0000  2 s a step"
