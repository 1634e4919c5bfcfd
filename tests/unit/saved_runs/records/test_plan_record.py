"""A step.yaml is read for its figures alone."""

import pytest
import yaml
from support.synthetic_runs import PLANNED

from geojax.saved_runs.records.plan_record import PlanRecord


def test_figures_and_links():
    planned = PlanRecord.parse(yaml.safe_dump(PLANNED, sort_keys=False))
    assert (planned.step_seconds.value, planned.step_seconds.error) == (7.1, 0.06)
    assert planned.device_bytes.value == 6.2e10
    assert planned.mesh["data"] == 8
    assert planned.devices[0] == "32 x NVIDIA H100 80GB HBM3, 4 processes"
    assert planned.link("east", "west").round_trip == 0.021
    assert planned.link(None, "west") == planned.link("west", "east")
    assert planned.link(None, "north") is None


def test_the_order_of_the_work_is_skipped():
    content = PLANNED | {"pipeline": {"actions": ["F0.0 " * 50] * 40_000}}
    text = yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False)
    assert PlanRecord.parse(text).step_seconds.value == 7.1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1\n",
        "seconds: [",
        "seconds: {value: x}\norigin: 5\n",
        "origin: {topology: {links: 3}}",
        "origin: {topology: {links: [{sites: [a], round_trip_seconds: 1, bytes_per_second: 1}]}}",
    ],
)
def test_anything_else_has_no_figures(text):
    planned = PlanRecord.parse(text)
    assert planned is None or (planned.step_seconds, planned.links) == (None, ())
