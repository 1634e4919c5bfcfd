"""What XLA's options for collectives make of a shipped step: streams, overlap and memory.

    python benchmarks/xla_options.py --output benchmarks/results/xla_options.json
    python benchmarks/xla_options.py configs/llama3-70b-2x64.yaml --options today domains

Each step is compiled ahead of time for its H100s, once for each set of options (the extra `aot`, no
GPU). The thunk dump of a program names the communication stream of every collective. Collectives
on one stream run one after the other; those on two may be in flight together. The table says:

    NVLink      the GPUs that XLA takes for joined by NVLink: those of a `host`, as H100s are, or of
                a whole `site`, as if every group inside a site were such a domain
    stream      messages of a device by stream; `compute`: the compute waits for them
    beside      share of the bytes that travel while matrix products run
    awaited     share of the bytes for which the compute waits
    together    share of the bytes that are in flight with collectives on other streams, by axes
    memory      temporary memory of a device
    compile     seconds of processor time

An option that this XLA does not know is named in the table. Rows of other configs, sets or versions
of JAX in an output file of before are kept.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from geojax.config.run_config import RunConfig
from geojax.mesh import make_mesh
from geojax.planner.compile_target import gpus
from geojax.planner.compiled_step import LEAST_PAYLOAD_BYTES, CompiledProgram
from geojax.planner.memory import CompiledMemory, TracedStep
from geojax.planner.resolve.traced_run import trace_on
from geojax.quantities import quantity

CONFIGS = Path(__file__).parents[1] / "configs"
STEPS = "nemotron4-340b-2x1536", "llama3-70b-2x256", "llama3-70b-2x64"
DOMAINS = {"xla_gpu_collective_domain_assignment": "scale_up_fabric"}
LIMIT = "xla_gpu_experimental_parallel_scale_up_collective_overlap_limit"
STREAMS = {"xla_gpu_experimental_enable_collective_multi_streaming": True}


class Options(NamedTuple):
    """Compiler options that come on top of those of the step."""

    options: dict[str, Any]
    nvlink: str = "host"


SETS = {
    "today": Options({}),
    "today, NVLink in a site": Options({}, "site"),
    "streams": Options(STREAMS),
    "limit 16": Options({LIMIT: 16}),
    "domains": Options(DOMAINS),
    "domains, limit 4": Options({**DOMAINS, LIMIT: 4}),
    "domains, limit 16": Options({**DOMAINS, LIMIT: 16}),
    "domains, no limit": Options({**DOMAINS, LIMIT: 0}),
    "domains, limit 16, streams": Options({**DOMAINS, LIMIT: 16, **STREAMS}),
    "domains of a site": Options(DOMAINS, "site"),
    "domains of a site, limit 16": Options({**DOMAINS, LIMIT: 16}, "site"),
}
"""The sets of options by name."""


def traced(config: RunConfig, nvlink: str) -> TracedStep:
    topology = config.load_topology()
    assert topology is not None, "a shipped config for two sites must name its topology"
    site = topology.sites[0]
    devices = gpus(
        len(topology.sites),
        site.hosts,
        site.accelerators_per_host,
        hosts_per_nvlink=1 if nvlink == "host" else site.hosts,
    )
    return trace_on(config, make_mesh(topology, devices=devices, **config.mesh.model_dump()))


def measured(step: TracedStep, options: Options) -> dict[str, Any]:
    began, cpu_began = time.monotonic(), time.process_time()
    try:
        compiled = CompiledProgram.of(step, options.options)
    except jax.errors.JaxRuntimeError as error:
        return {"refused": str(error).splitlines()[0]}
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
    memory = CompiledMemory.of(compiled.program)
    return {
        "compile_seconds": round(seconds, 1),
        "compile_cpu_seconds": round(cpu_seconds, 1),
        "temporary_memory_bytes": memory.temporaries,
        "memory_bytes": memory.bytes,
        "messages": [each.to_json() for each in compiled.messages(step.plan)],
    }


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    titles = "options", "NVLink", "collective", "sent", "stream", "beside", "awaited", "together"
    for title in (*titles, "memory", "compile"):
        result.add_column(title, justify="left" if title in titles else "right")
    for (config, jax_version), group in itertools.groupby(
        rows, lambda row: (row["config"], row["jax"])
    ):
        result.add_row(f"{config}, JAX {jax_version}", style="bold")
        for row in group:
            first = [row["options"], row["nvlink"]]
            if "refused" in row:
                result.add_row(*first, row["refused"])
                continue
            last = [
                quantity(row["temporary_memory_bytes"], "B"),
                f"{row['compile_cpu_seconds']:.0f} s",
            ]
            for each in row["messages"]:
                if each["bytes_sent"] < LEAST_PAYLOAD_BYTES:
                    continue
                result.add_row(*first, *cells(each), *last)
                first, last = ["", ""], []
    return result


def cells(messages: dict[str, Any]) -> list[str]:
    """The cells of the messages of one kind over the same axes."""
    sent = messages["bytes_sent"]
    return [
        f"{messages['axes']} {messages['kind']}",
        quantity(sent, "B"),
        ", ".join(f"{stream}: {count:,}" for stream, count in messages["streams"].items()),
        f"{messages['bytes_beside_compute'] / sent:.0%}",
        f"{messages['bytes_awaited'] / sent:.0%}",
        ", ".join(f"{axes} {part / sent:.0%}" for axes, part in messages["together"].items()),
    ]


def with_kept(rows: list[dict[str, Any]], output: Path) -> list[dict[str, Any]]:
    """The rows, and those of `output` that are not measured anew."""
    before = json.loads(output.read_text())["rows"] if output.exists() else []

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return row["config"], row["jax"], row["options"]

    by_key = {key(row): row for row in [*before, *rows]}
    names = list(SETS)
    return sorted(
        by_key.values(), key=lambda row: (row["config"], row["jax"], names.index(row["options"]))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("configs", nargs="*", type=Path, help=f"default: {', '.join(STEPS)}")
    parser.add_argument("--options", nargs="+", choices=SETS, default=list(SETS), metavar="SET")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # no accelerator is touched
    console = Console(width=200, highlight=False, soft_wrap=True, markup=False)
    rows = []
    for path in arguments.configs or [CONFIGS / f"{name}.yaml" for name in STEPS]:
        config = RunConfig.load(path)
        for nvlink in dict.fromkeys(SETS[name].nvlink for name in arguments.options):
            step = traced(config, nvlink)
            for name in arguments.options:
                if SETS[name].nvlink != nvlink:
                    continue
                row = {
                    "config": path.stem,
                    "jax": jax.__version__,
                    "options": name,
                    "nvlink": nvlink,
                    "xla_options": SETS[name].options,
                }
                rows.append(row | measured(step, SETS[name]))
                console.print(f"{path.stem}, {name}: compiled", style="dim")
                if arguments.output is not None:
                    write(with_kept(rows, arguments.output), arguments.output)
    console.print(table(rows))
    return 0


def write(rows: list[dict[str, Any]], output: Path) -> None:
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    machine["jaxlib"] = importlib.metadata.version("jaxlib")
    content = {"command": shlex.join(["python", *sys.argv]), "machine": machine, "rows": rows}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
