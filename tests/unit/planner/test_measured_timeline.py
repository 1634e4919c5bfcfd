"""The measured timeline of a step beside the simulated one, of sites without devices."""

import json

import pytest

from geojax.islands.actions import (
    Add,
    Receive,
    Reduce,
    breadth_first,
    data_actions,
    own_shares,
    stage_actions,
)
from geojax.islands.recording import Recorded, as_words, by_one_clock, from_words
from geojax.islands.stage_lists import data_schedule
from geojax.pipeline import Costs, Hop, one_forward_one_backward, simulate
from geojax.pipeline.schedule import Action
from geojax.planner.measured_timeline import draw, measured_costs, measured_timeline

FORWARD, BACKWARD, HOP = 1.0, 2.0, 0.5
START = 100.0


@pytest.fixture(scope="module")
def pipeline():
    """A schedule of two sites, its simulation, and the records of hosts that keep to it."""
    schedule = one_forward_one_backward(2, 4)
    timeline = simulate(schedule, Costs.uniform(2, FORWARD, BACKWARD, hop=Hop(HOP, link="0-1")))
    begins = {span.action: span.start for span in timeline.spans}
    ends = {span.action: span.end for span in timeline.spans}
    arrivals = {(each.action, each.target): each.end for each in timeline.messages}
    records = []
    for site in range(2):
        now, record = START, []
        for action in stage_actions(schedule, site, tied=False):
            start, here = now, ()
            if isinstance(action, Action):
                start, now = START + begins[action], START + ends[action]
            elif isinstance(action, Receive):
                step = -1 if action.action.kind.name == "FORWARD" else 1
                made = action.action._replace(chunk=action.action.chunk + step)
                here = (START + arrivals[made, site],)
                now = max(now, *here)
            elif isinstance(action, Add):
                here = (now,)
            taken = max(start, *here) if here else start
            record.append(Recorded(action, start, taken, now if here else start, now, here))
        records.append(record)
    return schedule, timeline, records


def test_a_step_as_simulated_is_measured_as_simulated(pipeline):
    schedule, simulated, records = pipeline
    measured = measured_timeline(schedule, records)
    assert measured.seconds == pytest.approx(simulated.seconds)
    # When a message's last byte left is not measured.
    assert [each._replace(sent=each.start) for each in measured.messages] == list(
        simulated.messages
    )
    assert [span.action for span in measured.spans] == [span.action for span in simulated.spans]
    for name in ("bubble_ratio", "bubble_inside_sites", "bubble_across_sites"):
        assert getattr(measured, name) == pytest.approx(getattr(simulated, name))
    costs = measured_costs(measured)
    assert costs.forward == pytest.approx((FORWARD,) * 2)
    assert costs.backward == pytest.approx((BACKWARD,) * 2)
    assert costs.hops[0].seconds == pytest.approx(HOP)


def test_the_picture_and_the_trace_show_both_and_every_action(pipeline, tmp_path):
    schedule, _, records = pipeline
    sites = dict(zip(("east", "west"), records, strict=True))
    draw(schedule, sites, tmp_path / "step.png", tmp_path / "step.json")
    assert (tmp_path / "step.png").stat().st_size > 10_000
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert ["measured" in names[0], "simulated" in names[1]] == [True, True]
    assert names[2] == "measured actions"
    waits = [event for event in events if event.get("cat") == "wait"]
    assert {event["name"] for event in waits} >= {"Receive F0.1", "Receive B3.0", "Add scalars"}
    arrival = waits[0]["args"]
    assert arrival == {"cotangent from site 1 arrives_us": pytest.approx(5e6)}
    devices = [event for event in events if event.get("cat") == "devices"]
    assert len(devices) == sum(map(len, records))


def test_records_of_all_sites_come_to_one_clock(pipeline):
    schedule, _, records = pipeline
    lists = [stage_actions(schedule, site, tied=False) for site in range(2)]
    own = [from_words(as_words([record], lists), [lists[n]])[0] for n, record in enumerate(records)]
    assert own == records
    hops = [
        [each for each in record if not isinstance(each.action, Add | Reduce)] for record in records
    ]
    ahead = [hops[0], [each.earlier(-7.5) for each in hops[1]]]
    for stages_per_site in (1, 2):  # of two processes then
        for record, wanted in zip(by_one_clock(ahead, stages_per_site, 1), hops, strict=True):
            for each, same in zip(record, wanted, strict=True):
                assert each.action == same.action
                assert (*each[1:5], *each.arrivals) == pytest.approx((*same[1:5], *same.arrivals))
    assert by_one_clock(ahead, 2, 2) == ahead


def test_messages_inside_a_site_are_on_no_link(pipeline):
    schedule, _, records = pipeline
    inside = measured_timeline(schedule, records, stages_per_site=2)
    assert {message.link for message in inside.messages} == {None}
    assert (inside.link_use, inside.bubble_across_sites) == ({}, 0.0)


def test_a_site_in_role_data_is_the_only_stage_of_its_schedule():
    schedule = breadth_first(3, 4, 2)
    assert data_schedule(data_actions(schedule, 0, own_shares(2))) == schedule
