"""Processes of one job, simulated one after the other in this one."""

import importlib

import pytest
from support.store import KEY, Store

from geojax.runtime import key_value_store

# The function of the same name hides the module of the barrier.
ASKING = [
    importlib.import_module(f"geojax.runtime.{name}")
    for name in ("barrier", "liveness.heartbeat", "liveness.health", "liveness.abort_notice")
]


class Job:
    """A job of `count` processes, of which this is `own` now."""

    def __init__(self):
        self.store = Store()
        self.own, self.count = 0, 1

    def processes(self, count):
        """Be each of `count` processes in turn."""
        self.count = count
        for self.own in range(count):
            yield self.own


@pytest.fixture
def job(monkeypatch):
    job = Job()
    monkeypatch.setattr(key_value_store, "_key", KEY)
    for module in (key_value_store, *ASKING):
        for name, answer in (
            ("coordination_client", lambda: job.store),
            ("process_index_and_count", lambda: (job.own, job.count)),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, answer)
    return job
