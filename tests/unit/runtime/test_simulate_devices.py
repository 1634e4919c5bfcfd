import os
import subprocess
import sys

import jax
import pytest

from geojax.errors import UserError
from geojax.runtime import simulate_devices


def run(program, **environment):
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_PLATFORMS": "", "NPROC": ""} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_devices_and_threads_are_set_after_jax_is_imported():
    """XLA's thread pool is what NPROC says although jax (and jaxlib) was imported before."""
    program = """
import jax
from geojax.runtime import simulate_devices
simulate_devices(12)
devices = jax.devices()
import os
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print(len(devices), os.environ["NPROC"], sum("Eigen" in name for name in names))
"""
    assert run(program) == ["12", "48", "48"]


def test_a_larger_nproc_is_left_alone_and_a_smaller_one_is_raised():
    program = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
from geojax.runtime import simulate_devices
simulate_devices({count})
print(os.environ["NPROC"])
"""
    assert run(program.format(count=2), NPROC="100") == ["100"]
    assert run(program.format(count=2), NPROC="3") == ["8"]
    assert run(program.format(count=6), NPROC="3") == ["24"]


def test_buffers_that_are_freed_are_taken_again():
    """The kernel clears each page once, although numpy takes every array anew."""
    program = """
import resource
import numpy
from geojax.runtime import simulate_devices
simulate_devices(1)
pages = 64 * 2**20 // resource.getpagesize()
for _ in range(2):
    numpy.ones(64 * 2**20, numpy.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    numpy.ones(64 * 2**20, numpy.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages // 10)
"""
    assert run(program) == ["True"]


def test_fifty_steps_in_flight_on_two_cores_do_not_starve():
    """Without enough threads this aborts at XLA's rendezvous timeout."""
    program = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from geojax.runtime import simulate_devices
simulate_devices(8)
import geojax, jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
mesh = geojax.make_mesh(dc=2, data=4)
spec = P(("dc", "data"))
def step(x):
    for _ in range(4):
        x = jax.lax.pmean(jnp.tanh(x @ x), ("dc", "data"))
        x = jax.lax.pcast(x, ("dc", "data"), to="varying")
    return x
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))
x = jnp.eye(8 * 64, 64)
for _ in range(50):
    x = step(x)
print(bool(jnp.isfinite(x).all()))
"""
    assert run(program) == ["True"]


def test_too_late_or_too_few_is_refused():
    assert len(jax.devices()) == 8
    simulate_devices(8)  # what already runs
    with pytest.raises(UserError, match="too late: JAX already runs with 8 cpu"):
        simulate_devices(4)
    with pytest.raises(UserError, match="at least 1"):
        simulate_devices(0)
