"""One process of a checkpoint test: saves or restores a state that is sharded over all devices.

    checkpoint_worker.py ACTION FOLDER DC DATA [COORDINATOR PROCESSES PROCESS]

ACTION is `save` (steps 10 and 20), `save-privately` (each process to a folder of its own),
`save-without-space` (process 1 cannot write step 10, and then can), `save-without-folder` and
`save-without-commit` (process 0 cannot make the folder of step 10, or rename it), `save-halfway`
(step 20 stops for good just before it is committed) or `restore`, which prints RESTORED and the
step when every value is what was saved. `sites-` before it: each site by itself, in a folder of its
own, as if there were no common file system.
"""

import functools
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding

from geojax.checkpoint import Checkpointer, manifest
from geojax.errors import UserError
from geojax.runtime import simulate_devices
from geojax.sharding.leaf_layouts import DimSharding, LeafLayout

TemporaryPath = ocp.path.atomicity.AtomicRenameTemporaryPath
CANNOT = {"save-without-folder": "create", "save-without-commit": "finalize"}
MODEL = {"layers": 2}
WEIGHTS = np.arange(24 * 7, dtype=np.float32).reshape(24, 7) / 3
MOMENTS = np.arange(5 * 24, dtype=np.float32).reshape(5, 24) / 7
VALUES = {"weights": WEIGHTS, "moments": MOMENTS, "scale": np.float32(1.5)}


def layouts_on(mesh: Mesh, *, cut_by_sites: bool) -> dict[str, LeafLayout]:
    """Weights over `data`, moments over `data` and perhaps over the sites, and a scalar."""
    data, sites = mesh.shape["data"], mesh.shape["dc"]
    axes, ranks = (("data", "dc"), data * sites) if cut_by_sites else (("data",), data)
    shards = {"weights": DimSharding(0, ("data",), data), "moments": DimSharding(1, axes, ranks)}
    return {
        name: LeafLayout(value.shape, value.dtype, shard=shards.get(name))
        for name, value in VALUES.items()
    }


def main(action: str, folder: str, dc: str, data: str, *distributed: str) -> None:
    coordinator, processes, process = distributed or ("", "1", "0")
    simulate_devices(int(dc) * int(data) // int(processes))
    if distributed:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(processes), int(process))
    devices = np.array(jax.devices()).reshape(int(dc), int(data))
    mesh = Mesh(devices, ("dc", "data"), axis_types=(AxisType.Auto,) * 2)
    sites = None
    if action.startswith("sites-"):
        action = action.removeprefix("sites-")
        sites = [f"site{site}" for site in range(int(dc))]
        folder = f"{folder}/file_system_{int(process) * int(dc) // int(processes)}"
    if action == "save-privately":
        folder = f"{folder}/process_{process}"
    if action == "save-without-space" and process == "1":
        manifest.write_part = functools.partial(fail_once, manifest.write_part)
    if process == "0" and action in CANNOT:
        method = CANNOT[action]
        setattr(TemporaryPath, method, fails_once(method, getattr(TemporaryPath, method)))
    if action == "save-halfway":
        manifest.write = functools.partial(stop_at_step_20, manifest.write)
    report = functools.partial(print, "REPORT")
    layouts = layouts_on(mesh, cut_by_sites=sites is not None)
    try:
        with Checkpointer(folder, mesh, sites=sites, keep=2, report=report) as checkpointer:
            (restore if action == "restore" else save)(checkpointer, mesh, layouts)
    except UserError as error:
        print("REFUSED", error, flush=True)


def fails_once(method, do):
    async def fail(path):
        setattr(TemporaryPath, method, do)
        raise OSError(28, "No space left on device")

    return fail


def fail_once(write_part, folder, process):
    manifest.write_part = write_part
    raise OSError(28, "No space left on device")


def stop_at_step_20(write, folder, content, parts):
    if content["step"] == 20:
        print("HALFWAY", flush=True)
        time.sleep(600)
    write(folder, content, parts)


def save(checkpointer: Checkpointer, mesh: Mesh, layouts: dict[str, LeafLayout]) -> None:
    for step in (10, 20):
        state = {
            name: jax.make_array_from_callback(
                value.shape,
                NamedSharding(mesh, layouts[name].spec()),
                lambda index, v=value, s=step: v[index] * s,
            )
            for name, value in VALUES.items()
        }
        checkpointer.save(step, state, layouts, {"model": MODEL, "data": {"row": step * 8}})
    print("SAVED", flush=True)


def restore(checkpointer: Checkpointer, mesh: Mesh, layouts: dict[str, LeafLayout]) -> None:
    state, metadata = checkpointer.restore(layouts, model=MODEL)
    for name, value in VALUES.items():
        assert state[name].sharding == NamedSharding(mesh, layouts[name].spec())
        for shard in state[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index] * metadata["step"])
    assert metadata["data"] == {"row": metadata["step"] * 8}
    print("RESTORED", metadata["step"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
