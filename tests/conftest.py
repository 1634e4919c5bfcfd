"""Every test sees eight simulated CPU devices, on any machine, and compiles fast."""

import gc
import os
from pathlib import Path

import hypothesis
import pytest
from support.xla_flags import COMPILE_FAST

from geojax.runtime import simulate_devices

simulate_devices(8)
# XLA ends a process whose devices wait for one another for 40 s: too short on a machine that has
# other work. Runs of `geojax train` wait longer too.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
# For this process, and for those that it starts.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_FAST} {PATIENT}"

# A machine with other work is slow now and then: no test is about the seconds of an example.
hypothesis.settings.register_profile("geojax", deadline=None)
hypothesis.settings.load_profile("geojax")

# What JAX keeps grows into millions of objects, and looking for garbage among them as often as
# Python does by default takes a tenth of the time.
gc.set_threshold(100_000, 50, 50)


# Their subject is processes and connections that end, hang and come too late, which other work on
# the machine may do to them as well: a failure counts when it repeats. The summary lists those that
# were tried again; nothing that computes is among them.
TRIED_TWICE = (
    "tests/unit/launch",
    "tests/unit/runtime",
    "tests/unit/transport",
    "tests/unit/wan",
    "tests/integration/test_emulated_link.py",
    "tests/integration/test_island_faults.py",
    "tests/integration/test_launch.py",
    "tests/integration/test_probe.py",
    "tests/integration/test_processes_mesh.py",
    "tests/integration/test_transport.py",
)


SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text().splitlines())
"""Tests that `./launch/test --all` alone runs (see `tests/support/slow_tests.py`)."""


PROCESSES = (
    "tests/unit/checkpoint/",
    "tests/unit/data/",
    "tests/unit/launch/",
    "tests/unit/membership/test_record_stores.py",
    "tests/unit/probe/",
    "tests/unit/runtime/",
    "tests/unit/transport/",
    "tests/unit/wan/",
)
"""Folders whose tests start processes, serve ports or write many files."""

COMPILES = frozenset(Path(__file__).with_name("compiles.txt").read_text().splitlines())
"""Files whose tests compile programs or trace whole steps: none of the ring of data."""


def pytest_ignore_collect(collection_path, config):
    """Import no test of another ring: that takes longer than some tests of the ring of data do."""
    name = collection_path.relative_to(config.rootpath).as_posix()
    if config.getoption("no_compile") and (name in COMPILES or f"{name}/".startswith(PROCESSES)):
        return True


LONG = "tests/equality/test_layouts.py"
"""The file of the longest tests."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
        if item.nodeid.partition("::")[0] in COMPILES:
            item.add_marker(pytest.mark.compiles)
        if item.nodeid.startswith(PROCESSES):
            item.add_marker(pytest.mark.processes)
        if item.nodeid.startswith(TRIED_TWICE):
            item.add_marker(pytest.mark.flaky(reruns=1))
    result = yield  # where other plugins leave out what is not asked for
    items[:] = long_ones_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    return result


def long_ones_first(items, workers):
    """Let each worker begin with its share of the long tests, so that none is last and alone.

    pytest-xdist gives every worker an equal run of the items, and of that the end to those who are
    done earlier.
    """
    long = [item for item in items if item.nodeid.startswith(LONG)]
    others = iter([item for item in items if not item.nodeid.startswith(LONG)])
    ordered, left = [], len(items)
    for worker in range(workers):
        share = left // (workers - worker)
        left -= share
        mine = long[worker::workers][:share]
        ordered += mine + [item for _, item in zip(range(share - len(mine)), others, strict=False)]
    begun = set(ordered)
    return ordered + [item for item in items if item not in begun]


COMPILED = "/jax/core/compile/backend_compile_duration"
compiled = []
"""An entry for each program that this process has compiled."""


def pytest_configure(config):
    if config.getoption("no_compile"):
        import jax.monitoring

        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: compiled.append(event) if event == COMPILED else None
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    compiled.clear()


def pytest_runtest_teardown(item):
    if compiled:
        pytest.fail(f"{item.name} compiles {len(compiled)} programs: name its file in compiles.txt")


def pytest_addoption(parser):
    parser.addoption(
        "--no-compile", action="store_true", help="a test that compiles a program fails"
    )
    parser.addoption("--draws", type=int, default=0, help="layouts drawn by the property test")
    parser.addoption("--draws-seed", type=int, default=0, help="what they are drawn from")
    parser.addoption("--fuzz-cases", type=int, default=160, help="cases of bad input that are run")
    parser.addoption(
        "--layouts",
        choices=["covering", "pairs"],
        default="covering",
        help="layouts compared with one device: pairs of kinds of values, or of values",
    )
