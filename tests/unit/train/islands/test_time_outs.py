"""The table of times after which sites act, and the links that they rest on."""

from types import SimpleNamespace

import pytest

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.going_on.handing_over import HandedBytes
from geojax.job.cluster_env import VARIABLES, ProcessSettings
from geojax.settings import leaves_by_key
from geojax.topology import Link
from geojax.train.islands.island_run import IslandRun
from geojax.train.islands.time_outs import rate_text, time_outs
from geojax.transport import MeasuredLink

LINKS = {"mid": MeasuredLink(0.035), "west": MeasuredLink(0.021)}
HANDED = HandedBytes(state=1_200_000_000, sums=400_000_000)


def config_of(*, join_pause=12, **sections):
    return RunConfig.model_validate(
        {
            "run_directory": "runs/mine",
            "steps": 10,
            "mesh": {"dc": 3},
            "dc": {"join": "islands"},
            "islands": {
                "on_loss": "go_on",
                "lease": {"path": "record"},
                "join_pause": join_pause,
            },
            "model": "tiny",
            "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
            "batch": {"global_batch_size": 6, "sequence_length": 32},
            **sections,
        }
    )


def times_of(config, lease=9, links=LINKS, rates=None):
    settings = ProcessSettings(heartbeat_timeout_seconds=lease)
    planned = {
        site: Link(round_trip_seconds=0.02, bytes_per_second=rate)
        for site, rate in (rates or {}).items()
    }
    return time_outs(config, settings, links, planned, HANDED)


def test_each_time_has_the_key_that_sets_it():
    config = config_of()
    (*lines, _, _), _ = times_of(config)
    assert lines[0].endswith(" 9 s  GEOJAX_HEARTBEAT_TIMEOUT")
    assert lines[1].endswith(" 4.05 s  GEOJAX_HEARTBEAT_TIMEOUT")  # 3 x (1 s + 10 x 35 ms)
    assert lines[2].endswith(" 6 s  2/3 of GEOJAX_HEARTBEAT_TIMEOUT")
    assert lines[5].endswith(" 27 s  3 x GEOJAX_HEARTBEAT_TIMEOUT")
    assert lines[6].endswith(" 12 s  islands.join_pause")
    assert lines[7].endswith(" 2 min  watchdog.minimum_seconds")
    known = {*VARIABLES.values(), *(name for name, _ in leaves_by_key(config.model_dump()))}
    assert {line.split()[-1] for line in lines} <= known


def test_the_table_ends_with_what_is_known_of_each_link():
    links = {**LINKS, "north": MeasuredLink()}
    (*_, mid, west, north), _ = times_of(config_of(), links=links, rates={"west": 125e6})
    assert mid == (
        "link to mid: round trip 35 ms (measured), rate not known before the first steps"
    )
    assert west == (
        "link to west: round trip 21 ms (measured), 1 Gbit/s (topology), by which a site that "
        "returns takes a state of 1.2 GB in 9.6 s and the sums of a step in 3.2 s"
    )
    assert north.startswith("link to north: round trip not measured, rate not known")


def test_an_eviction_time_that_is_too_short_for_a_round_trip_is_refused():
    links = {**LINKS, "west": MeasuredLink(0.25)}
    with pytest.raises(UserError) as error:
        times_of(config_of(), lease=10, links=links)
    assert str(error.value) == (
        "GEOJAX_HEARTBEAT_TIMEOUT=10 is too short: a message and its answer have a third of it, "
        "and may take 1 s and 10 round trips of 250 ms to site west; give 11 or more"
    )
    assert times_of(config_of(), lease=10.5, links=links)
    with pytest.raises(UserError, match="give 3 or more"):
        times_of(config_of(), lease=2, links={"west": MeasuredLink()})


@pytest.mark.parametrize(
    ("rates", "seconds", "key"),
    [
        ({}, 12, "islands.join_pause"),
        ({"west": 125e6, "mid": 250e6}, 15.2, "islands.join_pause"),
    ],
)
def test_a_step_may_take_as_long_as_a_pause_and_the_sums(rates, seconds, key):
    config = config_of(watchdog={"minimum_seconds": 10})
    lines, step_seconds = times_of(config, rates=rates)
    assert step_seconds == pytest.approx(seconds)
    assert lines[7].endswith(f" {seconds:g} s  {key}")
    assert times_of(config_of(), rates=rates)[1] == 120


@pytest.mark.parametrize("pause", [0, 5, 20])
def test_a_pause_in_which_no_step_crosses_is_of_no_use(pause):
    text = rate_text(40e6, "measured", HANDED, pause)
    assert text.startswith("320 Mbit/s (measured), by which")
    assert text.endswith(
        "in 10 s; islands.join_pause=5 is shorter, and of no use: give more, or 0"
        if pause == 5
        else "in 10 s"
    )


def test_rates_that_no_topology_has_are_told_once_after_a_window():
    said = []

    def end_of_step(steps, topology=None):
        run = SimpleNamespace(
            stages=SimpleNamespace(walks=[SimpleNamespace(steps=steps)]),
            config=config_of(topology=topology),
            links=SimpleNamespace(
                interval=50,
                measured=lambda: {"mid": MeasuredLink(), "west": MeasuredLink(0.021, 125e6)},
            ),
            handed_bytes=HANDED,
            log=said.append,
        )
        IslandRun._tell_first_rates(run)

    for steps in (1, 2, 50, 51, 52, 101):
        end_of_step(steps)
    end_of_step(51, topology="two-h100-sites")
    assert said == ["link to west: " + rate_text(125e6, "measured", HANDED, 12)]
