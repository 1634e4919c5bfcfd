"""What a training step sends between sites in each wire format.

    python benchmarks/wire.py --output benchmarks/results/wire.json

Counts are read from the step of `geojax train` as it is written for the compiler; that a compiled
step sends the same is a test (tests/unit/planner/test_step_traffic.py). Nothing is run or timed.
"""

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import jax
import rich.box
from rich.console import Console
from rich.table import Table

from geojax import make_mesh
from geojax.collectives import wire_format
from geojax.config.layout import Layout
from geojax.config.layout_sections import BatchSettings, MeshSettings
from geojax.errors import UserError
from geojax.hlo import collective_traffic
from geojax.layout_names import WireName
from geojax.models import ModelConfig, parameter_count
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.precision import policy
from geojax.runtime import simulate_devices
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import state_layouts

FORMATS: tuple[WireName, ...] = get_args(WireName)
SETTINGS, STEPS = OptimizerSettings(), 10


def bytes_of_site(model: ModelConfig, sites: int, data: int, wire: WireName, bucket: int) -> int:
    """What the devices of one site send across in a step."""
    mesh = make_mesh(dc=sites, data=data, devices=jax.devices()[: sites * data])
    layout = Layout(
        mesh=MeshSettings(**dict(mesh.shape)),
        batch=BatchSettings(global_batch_size=sites * data, sequence_length=64),
    )
    plan = StepPlan(
        mesh, policy("bf16"), layout, bucket_bytes=bucket, wire_format=wire_format(wire)
    )
    optimizer, schedule = make_optimizer(SETTINGS, STEPS), learning_rate_schedule(SETTINGS, STEPS)
    layouts = state_layouts(model, optimizer, plan)
    step = lower_step(layouts, model, plan, optimizer, schedule, batch_shape(sites * data, 64))
    return round(collective_traffic(step, mesh).bytes_over("dc") * data)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="a preset or a YAML file")
    parser.add_argument("--sites", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--data", type=int, default=4, help="devices of a site")
    parser.add_argument("--bucket-bytes", type=int, default=16 * 2**20)
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    arguments = parser.parse_args()

    try:
        model = ModelConfig.load(arguments.model)
    except UserError as error:
        parser.error(str(error))
    simulate_devices(max(arguments.sites) * arguments.data)
    parameters = parameter_count(model)
    table = Table(
        title=f"{arguments.model}: {parameters / 1e6:.1f}M parameters. MB that a site sends in a "
        "step (part of the uncompressed)",
        title_justify="left",
        box=rich.box.HORIZONTALS,
    )
    table.add_column("mesh", no_wrap=True)
    for wire in FORMATS:
        table.add_column(wire, justify="right", no_wrap=True)
    results: list[dict[str, Any]] = []
    for sites in arguments.sites:
        sent = {
            wire: bytes_of_site(model, sites, arguments.data, wire, arguments.bucket_bytes)
            for wire in FORMATS
        }
        results.append({"dc": sites, "data": arguments.data, "bytes_of_site": sent})
        cells = (f"{count / 1e6:.3g} ({count / sent['none']:.3f})" for count in sent.values())
        table.add_row(f"dc={sites} data={arguments.data}", *cells)
    Console().print(table)
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
            "model": arguments.model,
            "parameters": parameters,
            "bucket_bytes": arguments.bucket_bytes,
            "results": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
