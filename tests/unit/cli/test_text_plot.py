"""A plot in characters fills its size, and shows where a curve is high and low."""

import pytest

from geojax.cli.text_plot import Marked, text_plot


@pytest.mark.parametrize(("width", "height"), [(40, 8), (80, 12), (160, 20)])
@pytest.mark.parametrize("is_unicode", [True, False])
def test_the_size(width, height, is_unicode):
    line = [(float(step), 1 / step) for step in range(1, 500)]
    marked = [Marked("books", [(100.0, 0.02), (400.0, 0.01)], "red")]
    text = text_plot(line, marked, width, height, is_unicode=is_unicode).plain
    lines = text.splitlines()
    assert len(lines) == height
    assert max(map(len, lines)) == width
    assert "step 1" in lines[-1]
    assert lines[-1].endswith("499")
    assert text.count("o") == 2
    assert is_unicode or text.isascii()


def test_a_falling_line_begins_high_and_ends_low():
    text = text_plot([(step, -step) for step in range(40)], [], 50, 9, is_unicode=False).plain
    rows = text.splitlines()[:-1]
    assert rows[0].find("*") < rows[-1].find("*")
    assert rows[0].startswith("  0 ") or rows[0].split()[0] in ("0", "-0")


def test_no_points():
    assert text_plot([], [], 40, 8).plain == "no loss yet"


def test_one_point():
    assert "*" in text_plot([(1.0, 2.0)], [], 40, 8, is_unicode=False).plain
