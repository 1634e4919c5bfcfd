"""One process of a job, for test_processes_mesh: does what its argument says, prints JSON."""

import contextlib
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import geojax
from geojax import runtime
from geojax.errors import RunError, UserError
from geojax.runtime import rendezvous


def mesh(topology=None):
    """Which processes stand in which site of the mesh, and what sums over its axes give here."""
    runtime.start()
    topology = geojax.Topology.load(topology) if topology else None
    mesh = geojax.make_mesh(topology, dc=2, data=jax.device_count() // 2)
    whole = jax.NamedSharding(mesh, PartitionSpec(("dc", "data")))
    flat = [device.process_index for device in mesh.devices.flatten()]
    # Every device holds the number of its process, and sums it inside and across sites.
    numbers = jax.make_array_from_callback(
        (len(flat),), whole, lambda index: jnp.float32(flat)[index]
    )

    def sums(x):
        return jax.lax.psum(x, "data"), jax.lax.psum(x, "dc")

    program = jax.shard_map(
        sums,
        mesh=mesh,
        in_specs=PartitionSpec(("dc", "data")),
        out_specs=(PartitionSpec("dc"), PartitionSpec("data")),
    )
    in_site, across_sites = jax.jit(program)(numbers)
    print(
        json.dumps(
            {
                "sites": [[d.process_index for d in site.flatten()] for site in mesh.devices],
                "in_site": float(in_site.addressable_shards[0].data[0]),
                "across_sites": [float(s.data[0]) for s in across_sites.addressable_shards],
            }
        )
    )
    runtime.finish()


def barrier():
    """Process 1 comes late to the first barrier, which the others report; all meet at the next."""
    runtime.start()
    missing = None
    if jax.process_index() == 1:
        time.sleep(3)
    else:
        try:
            runtime.barrier("early", timeout_seconds=1)
        except runtime.MissingProcessesError as error:
            missing = {"message": str(error), "missing": error.missing}
    for _ in range(2):  # a name may be used again
        runtime.barrier("late", timeout_seconds=60)
    print(json.dumps(missing))
    runtime.finish()


def watchdog():
    """Process 1 hangs before step 3; the watchdogs of the others say so."""
    runtime.start()
    settings = runtime.WatchdogSettings(factor=2, minimum_seconds=4)
    with runtime.Watchdog(settings) as watchdog:
        for step in range(6):
            if step == 3 and jax.process_index() == 1:
                time.sleep(60)
            with watchdog.step(step):
                runtime.barrier("step", timeout_seconds=120)  # as a collective would wait


def failing(process):
    """One process finds something wrong with its own input while the others wait for it."""
    runtime.start()
    if jax.process_index() == int(process):
        raise UserError("my disk is empty")
    runtime.barrier("together", timeout_seconds=100)


def collective():
    """Process 1 is killed while all of them sum without end."""
    runtime.start()
    mesh = geojax.make_mesh(dc=3, data=jax.device_count() // 3)
    whole = jax.NamedSharding(mesh, PartitionSpec(("dc", "data")))
    x = jax.make_array_from_callback((mesh.size,), whole, lambda index: jnp.ones(mesh.size)[index])
    program = jax.jit(jnp.sum)
    with runtime.translate_collective_errors():
        for turn in itertools.count():
            if turn == 10 and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            program(x).block_until_ready()


STRANGER = """
import os, sys
from jax._src.lib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=5)
client.connect()
os._exit(0)
"""


def strangers():
    """Somebody sends rubbish to the coordinator's port, then connects as process 1."""
    runtime.start()
    coordinator = os.environ["GEOJAX_COORDINATOR"]
    if jax.process_index() == 1:
        host, port = coordinator.split(":")
        for rubbish in (b"\0\xff" * 9999, b"[" * 200_000, b'{"process": 1', b"GET / HTTP/1.1\r\n"):
            with contextlib.suppress(OSError), socket.create_connection((host, port)) as connection:
                connection.sendall(rubbish)
    runtime.barrier("all are well", 60)
    print("all are well", flush=True)
    if jax.process_index() == 1:
        subprocess.run([sys.executable, "-c", STRANGER, coordinator], capture_output=True)
    runtime.barrier("nobody", 100)


def leaving():
    """Process 1 joins, and never connects to JAX."""
    importlib.import_module("geojax.runtime.start")._CONNECT_SECONDS = 2
    arguments = (1, 2, os.environ["GEOJAX_COORDINATOR"], None, 60.0)
    key = {"key": os.environ["GEOJAX_KEY"].encode()}
    threading.Thread(target=rendezvous.join, args=arguments, kwargs=key, daemon=True).start()
    runtime.start()


def joining():
    """Process 1 stops as soon as all have connected."""
    initialize = jax.distributed.initialize

    def connect(coordinator, count, process, **settings):
        initialize(coordinator, count, process, **settings)
        if process == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    jax.distributed.initialize = connect
    runtime.start()


if __name__ == "__main__":
    tasks = {
        task.__name__: task
        for task in (mesh, barrier, watchdog, failing, collective, strangers, leaving, joining)
    }
    try:
        tasks[sys.argv[1]](*sys.argv[2:])
    except (UserError, RunError) as problem:
        code = 2 if isinstance(problem, UserError) else 1
        print(problem, file=sys.stderr)
        runtime.abort_job(str(problem), code)
        sys.exit(code)
