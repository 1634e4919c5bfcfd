"""The trace of a timeline, as Perfetto reads it."""

import json

import pytest
from hand_made import two_stages

from geojax.pipeline.trace import write_trace


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
