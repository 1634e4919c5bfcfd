"""A schedule is one entry of the registry: everything else reads it there."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from geojax.config.pipeline_settings import PipelineSettings
from geojax.errors import UserError
from geojax.pipeline import SCHEDULES, Costs, Hop, ScheduleEntry, schedule_entry
from geojax.pipeline.generators.warmup import with_warmups
from geojax.pipeline.orders import ORDERS, EventRequest, OrderMakers
from geojax.pipeline.simulation.compare import compare


def serial(stages, microbatches):
    """One microbatch at a time."""
    return with_warmups("serial", [0] * stages, microbatches)


SERIAL = ScheduleEntry(
    "serial",
    "One microbatch at a time.",
)
SERIAL_ORDERS = OrderMakers(
    lambda request: [serial(request.placement.stages, request.microbatches)],
    lambda request: serial(request.stages, request.microbatches),
)


def test_every_entry_has_makers_of_its_order():
    assert list(ORDERS) == list(SCHEDULES)


@pytest.mark.parametrize("entry", SCHEDULES.values(), ids=lambda entry: entry.name)
def test_an_entry_says_what_its_orders_are(entry):
    assert entry.description.endswith(".")
    assert schedule_entry(entry.name) is entry
    virtual_stages = entry.virtual_stages or 2
    PipelineSettings(schedule=entry.name, virtual_stages=virtual_stages)
    by_events = ORDERS[entry.name].by_events
    if by_events is None:
        return
    made = by_events(EventRequest((2, 2), 8, Costs.uniform(4, 1.0, 2.0), 4, virtual_stages))
    assert made.placement == entry.placement((2, 2), virtual_stages)
    assert made.split_backward == entry.split_backward


def test_a_new_entry_is_in_the_config_and_the_comparison(monkeypatch):
    with pytest.raises(ValueError, match="no schedule is called 'serial'; choose one of branch"):
        PipelineSettings(schedule="serial")
    monkeypatch.setitem(SCHEDULES, "serial", SERIAL)
    monkeypatch.setitem(ORDERS, "serial", SERIAL_ORDERS)
    PipelineSettings(schedule="serial")
    with pytest.raises(ValueError, match="serial requires virtual_stages=1; got 2, which inter"):
        PipelineSettings(schedule="serial", virtual_stages=2)

    def costs(placement):
        return Costs.uniform(placement.chunks, 0.01, 0.01, hop=Hop(0.01))

    comparison = compare(costs, (1, 1), 4, 2, 2, names=["1f1b", "serial"])
    times = {timed.name: timed.event_driven.seconds for timed in comparison.entries}
    assert times["serial"] > 1.5 * times["1f1b"]
    assert all(timed.lock_step is not None for timed in comparison.entries)
    with pytest.raises(UserError, match="no schedule is called 'fastest'"):
        compare(costs, (1, 1), 4, 2, 2, names=["fastest"])


def test_a_new_entry_is_in_the_help_of_the_command():
    added = dataclasses.replace(SCHEDULES["gpipe"], name="serial", description="One at a time.")
    program = (
        "from geojax.pipeline import SCHEDULES, registry\n"
        f"SCHEDULES['serial'] = registry.dataclasses.replace(SCHEDULES['gpipe'], name='serial',"
        f" description={added.description!r})\n"
        "from geojax.cli.main import run\n"
        "run(['plan', '--help'])\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    words = " ".join(shown.stdout.replace("│", " ").split())
    assert "serial: One at a time." in words
    for name in SCHEDULES:
        assert f"{name}: " in words


def test_every_entry_is_in_the_documentation():
    page = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert [name for name in SCHEDULES if not any(f"`{name}`" in row for row in rows)] == []
