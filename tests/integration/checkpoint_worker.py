"""One process of a checkpoint test: saves or restores a state that is sharded over all devices.

    checkpoint_worker.py ACTION FOLDER DC DATA [COORDINATOR PROCESSES PROCESS]

ACTION is `save` (steps 10 and 20), `save-privately` (each process to a folder of its own),
`save-halfway` (step 20 stops for good just before it is committed) or `restore`, which prints
RESTORED and the step when every value is what was saved.
"""

import functools
import sys
import time

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from geojax.checkpoint import Checkpointer, manifest
from geojax.errors import UserError
from geojax.runtime import simulate_devices

MODEL = {"layers": 2}
SHARDED = {
    "weights": (P("data"), np.arange(24 * 7, dtype=np.float32).reshape(24, 7) / 3),
    "moments": (P(None, "data"), np.arange(5 * 24, dtype=np.float32).reshape(5, 24) / 7),
    "scale": (P(), np.float32(1.5)),
}


def main(action: str, folder: str, dc: str, data: str, *distributed: str) -> None:
    coordinator, processes, process = distributed or ("", "1", "0")
    simulate_devices(int(dc) * int(data) // int(processes))
    if distributed:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(processes), int(process))
    if action == "save-privately":
        folder = f"{folder}/process_{process}"
    if action == "save-halfway":
        manifest.write = functools.partial(stop_at_step_20, manifest.write)
    devices = np.array(jax.devices()).reshape(int(dc), int(data))
    mesh = Mesh(devices, ("dc", "data"), axis_types=(AxisType.Auto,) * 2)
    report = functools.partial(print, "REPORT")
    try:
        with Checkpointer(folder, keep=2, report=report) as checkpointer:
            (restore if action == "restore" else save)(checkpointer, mesh)
    except UserError as error:
        print("REFUSED", error, flush=True)


def stop_at_step_20(write, folder, content, **settings):
    if content["step"] == 20:
        print("HALFWAY", flush=True)
        time.sleep(600)
    write(folder, content, **settings)


def save(checkpointer: Checkpointer, mesh: Mesh) -> None:
    for step in (10, 20):
        state = {
            name: jax.make_array_from_callback(
                value.shape, NamedSharding(mesh, spec), lambda index, v=value, s=step: v[index] * s
            )
            for name, (spec, value) in SHARDED.items()
        }
        checkpointer.save(step, state, {"model": MODEL, "data": {"row": step * 8}})
    print("SAVED", flush=True)


def restore(checkpointer: Checkpointer, mesh: Mesh) -> None:
    abstract = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))
        for name, (spec, value) in SHARDED.items()
    }
    state, metadata = checkpointer.restore(abstract, model=MODEL)
    for name, (_, value) in SHARDED.items():
        assert state[name].sharding == abstract[name].sharding
        for shard in state[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index] * metadata["step"])
    assert metadata["data"] == {"row": metadata["step"] * 8}
    print("RESTORED", metadata["step"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
