"""Plots have round ticks, labels that do not meet, and stay in their area."""

import itertools
import re

import pytest

from geojax.cli.svg_plot import (
    Bar,
    Lane,
    Series,
    Tick,
    cut,
    lane_plot,
    line_plot,
    share_bar,
    stack_plot,
    tick_format,
    ticks,
)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, ["0", "2", "4", "6", "8", "10"]),
        (0, 12, ["0.0", "2.5", "5.0", "7.5", "10.0", "12.5"]),
        (1.61, 1.97, ["1.6", "1.7", "1.8", "1.9", "2.0"]),
        (0, 0, None),
        (0, 3e12, None),
        (-1e99, 1e99, None),
    ],
)
def test_ticks_cover_the_range_and_read_differently(low, high, expected):
    marks = ticks(low, high, 5)
    assert marks[0] <= low
    assert marks[-1] >= high
    words = [tick_format(marks)(mark) for mark in marks]
    assert len({*words}) == len(words) <= 12
    assert expected is None or words == expected


def labels_of(svg):
    return [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*class="label"', svg)]


def test_labels_do_not_meet():
    series = [Series(f"run {each}", [[(0, 1), (1, 1)]], "#000") for each in range(9)]
    ys = sorted(labels_of(line_plot("title", series, "step", "loss")))
    assert len(ys) == 9
    assert min(b - a for a, b in itertools.pairwise(ys)) >= 12
    assert ys[-1] <= 250


def test_lines_break_between_segments():
    svg = line_plot("t", [Series("", [[(0, 1), (1, 2)], [(3, 4), (5, 6)]], "#000")], "x", "y")
    assert svg.count("<path") == 2


def test_a_cut_off_line_says_so():
    svg = line_plot("t", [Series("", [[(0, 9), (1, 1)]], "#000")], "x", "y", y_range=(0, 2))
    assert "cut off: up to 9" in svg


def test_nothing_to_draw():
    assert "t: not recorded." in line_plot("t", [Series("a", [[]], "#000")], "x", "y")
    assert "t: not recorded." in stack_plot("t", [], {"a": "#000"}, {}, "x", "y")


def test_stacks_bars_and_shares():
    svg = stack_plot("t", [(1, {"a": 1.0}), (2, {"b": 2.0})], {"a": "#1", "b": "#2"}, {}, "x", "y")
    assert svg.count("<path") == 2
    lane = Lane("saves", [Bar(0, 9, "#000", "1: end", "whole")], [Tick(3, "step 3")], "#111")
    svg = lane_plot("t", [lane], (0, 10), "hours")
    assert "<title>step 3</title>" in svg
    assert "1: end" in svg
    assert "productive 90%" in share_bar("t", [("productive", 0.9, "#000"), ("lost", 0.1, "#111")])


def test_long_labels_are_cut():
    assert cut("x" * 50) == "x" * 21 + "…"
