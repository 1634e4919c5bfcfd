"""A line of metrics as a record: known figures are typed, anything else is left out."""

import json

import pytest

from geojax.saved_runs.records.step_record import StepRecord


def test_figures_of_links_sites_and_parts():
    record = StepRecord.of(
        {
            "step": 7,
            "loss": 2.5,
            "seconds": 1.5,
            "seconds/data": 0.25,
            "seconds/device": 1.25,
            "validation/books": 3.0,
            "link/west/sent_bytes_per_second": 1e9,
            "link/west/wait_seconds": 0.5,
            "link/west/wait_seconds_gradients": 0.4,
            "link/west/round_trip_seconds": 0.02,
            "link/north/planned_wait_seconds": 0.3,
            "site/west/age_seconds": 4.0,
        }
    )
    assert record.step == 7
    assert record.seconds_of_parts == {"data": 0.25, "device": 1.25}
    assert record.validation == {"books": 3.0}
    west = record.links["west"]
    assert (west.sent_per_second, west.wait_seconds, west.round_trip_seconds) == (1e9, 0.5, 0.02)
    assert west.wait_causes == {"gradients": 0.4}
    assert record.links["north"].planned_wait_seconds == 0.3
    assert record.sites["west"].age_seconds == 4.0
    assert record.is_of_training


@pytest.mark.parametrize("step", ["1", None, -1, True, 1.5, 2**60])
def test_a_line_without_a_step_is_none(step):
    assert StepRecord.of({"step": step, "loss": 1.0}) is None


def test_hostile_values_are_left_out():
    line = json.loads(
        '{"step": 1, "loss": null, "a": NaN, "b": Infinity, "c": 1e300, "d": true, "e": "x", '
        f'"f": [1], "g": {10**400}, "mfu": 0.5, "link/../x/sent_bytes": 1, '
        '"link/a b/sent_bytes": 1}'
    )
    record = StepRecord.of(line)
    assert {name for name in record.values if not name.startswith("link/")} == {"mfu"}
    assert record.links == {}
    assert not record.is_of_training
    many = StepRecord.of({"step": 1, **{f"x{number}": 1 for number in range(5000)}})
    assert len(many.values) <= 256
