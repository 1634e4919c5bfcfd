"""Three of the layouts that `benchmarks/memory.py` compiled for H100s, estimated anew."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from geojax.planner.memory_phases import estimate_error

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
ROWS = json.loads((BENCHMARKS / "results" / "memory.json").read_text())["layouts"]


@pytest.mark.parametrize("name", ["dense 8", "experts 8", "islands 2"])
def test_the_estimate_is_as_near_to_the_compiled_memory_as_it_says(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("memory")
    row = next(row for row in ROWS if row["name"] == name)
    error = module.error_of(module.estimated(row))
    del sys.modules["memory"]
    assert abs(error) <= estimate_error(module.config_of(row).model)
