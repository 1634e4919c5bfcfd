"""The log and the metrics of windows of steps beside a plan."""

import pytest
from support.resolving import step_of

from geojax.config.run_config import RunConfig
from geojax.islands.traffic import LinkTraffic
from geojax.topology import Topology
from geojax.train.adapt.comparison import Plan, PlanComparison, plan_of_step
from geojax.train.links.deviations import LinkFigures, StepFigures
from geojax.transport import MeasuredLink

PLAN = Plan(StepFigures(0.8, {"west": LinkFigures(0.021, 1.25e8)}), 0.1)


class Run:
    """A comparison in windows of two steps, and what it logs and writes."""

    def __init__(self, plan=PLAN):
        self.lines, self.metrics, self.steps = [], {}, 0
        self.link = MeasuredLink(0.021, 1.2e8)
        self.comparison = PlanComparison(
            plan, 2, lambda: {"west": self.link}, self.tell, self.metrics.__setitem__
        )

    def tell(self, step, text):
        self.lines.append(f"step {step}: {text}")

    def window(self, seconds, wait=0.1):
        del self.lines[:]
        traffic = {"west": LinkTraffic(wait_seconds={"bucket": wait})}
        for _ in range(2):
            self.steps += 1
            self.comparison.record(self.steps, seconds, traffic)
        return self.lines


@pytest.fixture
def run():
    made = Run()
    made.comparison.record(0, 60.0, {})  # the first step compiles
    return made


def test_the_first_window_is_held_to_the_plan_and_later_ones_to_it(run):
    (line,) = run.window(1.0)
    assert line == (
        "step 2: a step takes 1 s, +25% of the plan's 0.8 s (known to 10%); later steps are "
        "compared with this one"
    )
    assert run.metrics == {
        2: {
            "link/west/round_trip_seconds": 0.021,
            "link/west/bytes_per_second": 1.2e8,
            "link/west/topology_bytes_per_second": 1.25e8,
        }
    }
    assert run.window(1.05) == []


def test_a_deviation_is_logged_when_it_begins_and_when_it_ends(run):
    run.window(1.0)
    run.link = MeasuredLink(0.021, 2.5e7)
    assert run.window(3.0, 2.1) == [
        "step 4: link to west: 200 Mbit/s, planned 1 Gbit/s: a slower link"
    ]
    assert run.window(3.0, 2.1) == []
    run.link = MeasuredLink(0.021, 1.2e8)
    (line,) = run.window(1.5, 0.6)
    assert "west is late (a straggler)" in line
    assert run.window(1.0) == ["step 10: steps and links are as expected again"]


def test_a_link_that_never_was_as_planned_is_named_in_the_first_window(run):
    run.link = MeasuredLink(0.1, 1.2e8)
    assert run.window(1.0)[1:] == [
        "step 2: link to west: round trip 100 ms, planned 21 ms: a slower link"
    ]


def test_links_of_a_plan_are_those_of_the_own_site():
    config = {
        "run_directory": "run",
        "steps": 10,
        "topology": "two-h100-sites",
        "model": "llama3-70b",
        "remat": "full",
        "data": {"sources": [{"name": "text", "prepared": "text"}]},
        "batch": {"global_batch_size": 1536, "sequence_length": 8192, "microbatches": 4},
        "mesh": {"dc": 2, "data": 192, "tensor": 8},
    }
    own = RunConfig.model_validate(config)
    plan = plan_of_step(step_of(own), own.load_topology(), "west")
    assert list(plan.figures.links) == ["east"]
    assert plan.figures.links["east"].round_trip_seconds == 0.021
    assert plan.figures.step_seconds > 1
    one_site = config | {"mesh": {"data": 384, "tensor": 8}}
    alone = RunConfig.model_validate(one_site | {"topology": None})
    assert plan_of_step(step_of(alone), Topology.load("two-h100-sites"), "west") is None
