"""The trace of a timeline, as Perfetto reads it."""

import collections
import itertools
import json
import math

import pytest
from hand_made import two_stages

from geojax.pipeline import (
    Costs,
    Hop,
    Placement,
    best_tick_table,
    latency_hiding,
    lock_step,
    one_forward_one_backward,
    simulate,
)
from geojax.pipeline.drawing.trace import write_trace


@pytest.fixture
def events(tmp_path):
    path = tmp_path / "trace.json"
    write_trace([two_stages(), two_stages(1)], path)
    return json.loads(path.read_text())["traceEvents"]


def of_phase(events, phase, process=1):
    return [event for event in events if event["ph"] == phase and event["pid"] == process]


def test_tracks_are_named(events):
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    for process in (1, 2):
        tracks = [names[process, track] for track in range(4)]
        assert tracks[:2] == ["stage 0", "stage 1"]
        assert tracks[2:] == [
            "link east-west, to later stages",
            "link east-west, to earlier stages",
        ]
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert titles == ["one at a time: 26 s, bubble 76.92%", "one at a time: 13 s, bubble 76.92%"]


def test_slices_are_the_spans_and_the_sendings_in_microseconds(events):
    slices = of_phase(events, "X")
    work = [event for event in slices if event["cat"] != "sending"]
    assert [(e["tid"], e["ts"], e["dur"]) for e in work[:3]] == [
        (0, 0.0, 1e6),
        (1, 4.5e6, 1e6),
        (1, 5.5e6, 2e6),
    ]
    assert (work[2]["name"], work[2]["cat"]) == ("B0.1", "backward")
    assert len(work) == 8
    sendings = [event for event in slices if event["cat"] == "sending"]
    assert [(e["tid"], e["ts"], e["dur"]) for e in sendings[:2]] == [
        (2, 1e6, 5e5),
        (3, 7.5e6, 5e5),
    ]
    assert sendings[0]["args"] == {"arrives_us": 4.5e6}


def test_arrows_lead_from_the_work_by_the_link_to_the_work_that_waited(events):
    for process in (1, 2):
        slices = of_phase(events, "X", process)
        for begin in of_phase(events, "s", process):
            arrow = [event for event in events if event.get("id") == begin["id"]]
            ends = []
            for event in arrow:
                (slice_,) = [
                    s
                    for s in slices
                    if s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
                ]
                ends.append(slice_["name"])
            made = begin["name"]
            used = {"F0.0": "F0.1", "B0.1": "B0.0", "F1.0": "F1.1", "B1.1": "B1.0"}[made]
            assert [event["ph"] for event in arrow] == ["s", "t", "f"]
            assert ends == [made, made, used]


THIRD = 1 / 3  # of a second: no whole number of nanoseconds
CUT = Costs(
    (THIRD,) * 4,
    (2 * THIRD,) * 4,
    (0.0,) * 4,
    (Hop(1e-5, 1e-5), Hop(0.7 * THIRD, THIRD / 7, "east-west"), Hop(1e-5, 1e-5)),
)


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory):
    """Of several schedules, in both modes, with times that do not fit the nanosecond."""
    table = best_tick_table("geopipe", Placement.linear(4), 24, CUT)
    timelines = [
        simulate(one_forward_one_backward(4, 24), CUT),
        simulate(latency_hiding(24, CUT, 6, split_backward=True), CUT),
        lock_step(table, CUT),
    ]
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(timelines, path)
    return json.loads(path.read_text())


def nanoseconds(event):
    start = round(1e3 * event["ts"])
    return start, start + round(1e3 * event["dur"])


FIELDS = {
    "M": {"name", "args"},
    "X": {"name", "cat", "ts", "dur", "args"},
    "s": {"name", "cat", "id", "ts"},
    "t": {"name", "cat", "id", "ts"},
    "f": {"name", "cat", "id", "ts", "bp"},
}


def test_events_have_the_fields_of_the_format(long_trace):
    assert long_trace["displayTimeUnit"] in ("ms", "ns")
    named = {"process_name": set(), "thread_name": set()}
    for event in long_trace["traceEvents"]:
        assert {"ph", "pid", "tid"} <= event.keys()
        assert event.keys() - {"ph", "pid", "tid", "cname"} in (
            FIELDS[event["ph"]],
            FIELDS[event["ph"]] | {"args"},
        )
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        for time in ("ts", "dur"):
            value = event.get(time, 0.0)
            assert math.isfinite(value)
            assert value >= 0
        if event["name"] in named:
            assert event["ph"] == "M"
            assert event["args"]["name"]
            named[event["name"]].add((event["pid"], event["tid"]))
    tracks = {(event["pid"], event["tid"]) for event in long_trace["traceEvents"]}
    assert named["thread_name"] == tracks
    assert {process for process, _ in named["process_name"]} == {process for process, _ in tracks}


def test_slices_of_a_track_do_not_overlap(long_trace):
    tracks = collections.defaultdict(list)
    for event in long_trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(nanoseconds(event))
    assert len(tracks) == 3 * (4 + 2)
    for slices in tracks.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(slices)):
            assert end <= start


def test_every_arrow_goes_forwards_in_time_from_slice_to_slice(long_trace):
    slices = collections.defaultdict(set)
    arrows = collections.defaultdict(list)
    for event in long_trace["traceEvents"]:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].add(event["ts"])
        elif event["ph"] in "stf":
            arrows[event["id"]].append(event)
    assert len(arrows) == 3 * 24 * 2 * 3
    for arrow in arrows.values():
        assert "".join(event["ph"] for event in arrow) in ("sf", "stf")
        times = [event["ts"] for event in arrow]
        assert times == sorted(times)
        for event in arrow:
            assert event["ts"] in slices[event["pid"], event["tid"]]
