"""step.yaml: the resolved step of a run, and what it was resolved from."""

import os
from collections.abc import Sequence
from pathlib import Path

import jax
import yaml

import geojax
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.settings import load_yaml, validate
from geojax.step.resolved import DescribedDevice, Origin, RuntimeDevices, Step
from geojax.topology import Topology
from geojax.yaml_syntax import Dumper

MOST_BYTES = 1 << 24
"""Size of the largest step.yaml: that of 131,072 microbatches of all chunks has 4 MB."""


Devices = Sequence[jax.Device] | Sequence[DescribedDevice]
"""The devices of a run, site by site; those of islands are described."""


def origin_of(config: RunConfig, topology: Topology | None, devices: Devices) -> Origin:
    """Return what a step of these is resolved from."""
    return Origin(
        geojax=geojax.__version__,
        devices=tuple(map(runtime_devices, of_runtimes(config, devices))),
        topology=None if topology is None else topology.model_dump(mode="json"),
        config=config.model_dump(mode="json", exclude={"profile"}),  # which decides nothing
    )


def of_runtimes(config: RunConfig, devices: Devices) -> list[Devices]:
    """Divide the devices of a run among its runtimes: all are of one program, or of a site each."""
    runtimes = config.mesh.dc if config.dc.join == "islands" else 1
    assert len(devices) % runtimes == 0, "islands have equally many devices"
    count = len(devices) // runtimes
    return [devices[count * each :][:count] for each in range(runtimes)]


def runtime_devices(devices: Devices) -> RuntimeDevices:
    """Describe the devices of one runtime together."""
    return RuntimeDevices(
        kind=" and ".join(sorted({device.device_kind for device in devices})),
        count=len(devices),
        processes=len({device.process_index for device in devices}),
    )


def read_step(path: Path) -> Step | None:
    """Read a step; None: there is no such file.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    if not path.is_file():
        return None
    try:
        return validate(Step, load_yaml(path, MOST_BYTES), str(path))
    except UserError as error:
        raise UserError(f"{error}; without the file the step is resolved anew") from None


def write_step(step: Step, path: Path) -> Path | None:
    """Write a step as YAML, atomically.

    Returns:
        Where the file that stood there is kept: step.1.yaml, say; None: there was none.
    """
    temporary = path.with_suffix(".yaml.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        yaml.dump(
            step.model_dump(mode="json"),
            file,
            Dumper=Dumper,
            sort_keys=False,
            allow_unicode=True,
            width=100,
        )
        file.flush()
        os.fsync(file.fileno())
    earlier = None
    if path.exists():
        earlier = _unused(path)
        os.link(path, earlier)
    temporary.replace(path)
    return earlier


def _unused(path: Path) -> Path:
    """Return the first of step.1.yaml, step.2.yaml and so on that is not there."""
    number = 1
    while (numbered := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return numbered
