"""What deviates between a plan and a window, by plain numbers."""

import dataclasses

import pytest

from geojax.topology import Topology
from geojax.train.links.deviations import (
    WINDOWS,
    LinkFigures,
    StepFigures,
    changed_links,
    deviations,
    is_unexplained,
    with_links,
)

LINK = LinkFigures(0.021, 1.25e8, {"bucket": 0.1, "scalars": 0.02})
ISLAND = StepFigures(1.0, {"west": LINK})
ONE_PROGRAM = StepFigures(1.0, {"west": LinkFigures(0.021)})


def with_link(figures, **changes):
    link = dataclasses.replace(figures.links["west"], **changes)
    return dataclasses.replace(figures, links={"west": link})


def kinds(expected, measured):
    return [each.kind for each in deviations(expected, measured)]


@pytest.mark.parametrize("figures", [ISLAND, ONE_PROGRAM])
def test_what_is_as_expected_is_no_deviation(figures):
    assert kinds(figures, figures) == []
    near = with_link(figures, round_trip_seconds=0.0225)
    assert kinds(figures, dataclasses.replace(near, step_seconds=1.05)) == []


def test_a_slower_link_is_named_and_the_wait_for_it_is_no_straggler():
    slower = with_link(ISLAND, bytes_per_second=2.5e7, wait_seconds={"bucket": 2.1})
    slower = dataclasses.replace(slower, step_seconds=2.98)
    (found,) = deviations(ISLAND, slower)
    assert (found.kind, found.site) == ("link", "west")
    assert found.text == "link to west: 200 Mbit/s, planned 1 Gbit/s: a slower link"
    longer = with_link(ISLAND, round_trip_seconds=0.1)
    (found,) = deviations(ISLAND, longer)
    assert found.text == "link to west: round trip 100 ms, planned 21 ms: a slower link"
    (found,) = deviations(slower, ISLAND)
    assert found.text.endswith("a faster link")


def test_a_site_that_is_late_over_a_link_as_planned_is_a_straggler():
    late = with_link(ISLAND, wait_seconds={"bucket": 0.6, "scalars": 0.02})
    (found,) = deviations(ISLAND, dataclasses.replace(late, step_seconds=1.5))
    assert (found.kind, found.site) == ("late site", "west")
    assert "waits 620 ms a step for west, most of it for 'bucket', expected 120 ms" in found.text


def test_slower_compute_is_told_from_waits():
    (found,) = deviations(ISLAND, dataclasses.replace(ISLAND, step_seconds=1.2))
    assert found.kind == "compute"
    assert found.text.startswith("compute of a step 1.08 s, expected 0.88 s: a slower kernel")


def test_of_one_program_only_the_step_and_the_round_trip_are_known():
    slow = dataclasses.replace(ONE_PROGRAM, step_seconds=1.5)
    (found,) = deviations(ONE_PROGRAM, slow)
    assert found.text == (
        "step 1.5 s, expected 1 s: a link of another rate, a straggler or slower kernels"
    )
    assert kinds(ONE_PROGRAM, with_link(slow, round_trip_seconds=0.05)) == ["link", "step"]


def test_figures_that_are_not_known_deviate_from_nothing():
    unknown = StepFigures(None, {"west": LinkFigures()})
    assert kinds(unknown, ISLAND) == kinds(ISLAND, unknown) == []
    assert kinds(StepFigures(1.0), ISLAND) == []


def test_a_link_has_changed_when_it_was_off_in_three_windows_in_a_row():
    off = [
        with_link(ISLAND, bytes_per_second=rate, round_trip_seconds=trip)
        for rate, trip in ((2.4e7, 0.022), (2.6e7, 0.021), (2.5e7, None))
    ]
    assert len(off) == WINDOWS
    assert changed_links(ISLAND, off[1:]) == {}
    assert changed_links(ISLAND, [*off[:2], ISLAND]) == {}
    assert changed_links(ISLAND, [ISLAND, *off]) == {"west": LinkFigures(0.0215, 2.5e7)}


def test_a_step_that_nothing_explains_in_three_windows_asks_for_a_measurement():
    slow = dataclasses.replace(ONE_PROGRAM, step_seconds=1.5)
    assert not is_unexplained(ONE_PROGRAM, [slow, slow])
    assert not is_unexplained(ONE_PROGRAM, [slow, ONE_PROGRAM, slow])
    assert is_unexplained(ONE_PROGRAM, [slow, slow, slow])
    assert not is_unexplained(ISLAND, [dataclasses.replace(ISLAND, step_seconds=1.5)] * 3)


def test_a_topology_takes_what_was_measured_of_its_links():
    topology = Topology.load("two-h100-sites")
    before = topology.link("east", "west")
    measured = {
        ("east", "west"): LinkFigures(0.03, 2e9),
        ("west", "east"): LinkFigures(0.04, None),
    }
    changed = with_links(topology, measured)
    there, back = changed.link("east", "west"), changed.link("west", "east")
    assert (there.round_trip_seconds, there.bytes_per_second) == (0.03, 2e9)
    assert back.bytes_per_second == before.bytes_per_second
    assert with_links(topology, {}).link("east", "west") == before
    assert changed.sites == topology.sites
