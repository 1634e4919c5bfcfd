"""What the shipped two-site configs become: compiled for their H100s, on a machine without one.

    python benchmarks/at_scale.py --output benchmarks/results/at_scale.json

`geojax plan --compile` compiles each config in a process of its own (the extra `aot`, no GPU). The
compiled program gives the memory of a device, the bytes and messages over dc, and the streams of
collectives. Exposure is predicted from FLOPs and the topology's links: of the cross-site sum of
gradients (and its part that round trips are to blame for), and of hops between sites.

A goal that is missed is named, and the exit code is 1:

    fits        the compiled step fits into the usable memory of a GPU
    estimate    the traced memory is within 5% of the compiled program's
    latency     exposed round trips of the cross-site sum take at most 2% of a step
    sum         the exposed part of the cross-site sum takes at most 4% of a step
    hops        the exposed part of hops takes at most 2% of a step
    plan        the bytes over dc are within 2% of those that `geojax plan` predicts
    effort      the compile took at most ten minutes and 20 GB
    beside      where gradients are sent beside the backward pass of whole models, at least half of
                the bytes over dc travel beside matrix products in the compiled program

Rows of other configs in an output file of before are kept.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from geojax.config.run_config import RunConfig
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.resolve.choices import resolved_plan
from geojax.planner.resolve.link_plan import gradient_exposure
from geojax.planner.resolve.pipeline_plan import hop_exposure
from geojax.planner.resolve.traced_run import accelerator_of_run
from geojax.quantities import quantity
from geojax.step.plan import StepPlan

CONFIGS = Path(__file__).parents[1] / "configs"
ESTIMATE_TOLERANCE = 0.05
PLAN_TOLERANCE = 0.02
MOST_SECONDS, MOST_BYTES = 600, 20e9
LEAST_BESIDE = 0.5
LIMITS = {"latency": 0.02, "sum": 0.04, "hops": 0.02}


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Shares of a step that nothing hides; None where nothing of the kind crosses."""

    step_seconds: float | None
    latency: float | None
    sum: float | None
    hops: float | None


def two_site_configs() -> list[Path]:
    return sorted(
        path
        for path in CONFIGS.glob("*.yaml")
        if (config := RunConfig.load(path)).mesh.dc == 2 and config.simulate_devices is None
    )


def plan_of(config: RunConfig) -> StepPlan:
    mesh = abstract_mesh(config.mesh.model_dump(), accelerator=accelerator_of_run(config))
    return resolved_plan(config, mesh)


def exposed(config: RunConfig, plan: StepPlan) -> Exposed:
    seconds = latency = sums = hops = None
    predicted = gradient_exposure(config, plan)
    if predicted is not None and predicted[1] is not None:
        exposure, times = predicted
        seconds = times.step_seconds
        latency, sums = exposure.latency_seconds / seconds, exposure.seconds / seconds
    of_hops = hop_exposure(config, plan)
    if of_hops is not None:
        seconds = of_hops.step_seconds
        hops = of_hops.seconds / seconds
    return Exposed(seconds, latency, sums, hops)


def compiled(path: Path, config: RunConfig) -> dict[str, Any]:
    """The figures of `geojax plan --compile`, whose exit code 1 says that the step does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        target = f"h100:{config.mesh.devices}"
        command = ["plan", str(path), "--rows", "0", "--compile"]
        command += ["--target", target, "--json", str(figures)]
        result = subprocess.run(
            [sys.executable, "-m", "geojax", *command], capture_output=True, text=True, check=False
        )
        if not figures.exists():
            sys.exit(f"{path.name}: geojax {' '.join(command)} failed\n{result.stderr[-4000:]}")
        return json.loads(figures.read_text())["compiled"]


def measured(path: Path) -> dict[str, Any]:
    config = RunConfig.load(path)
    figures = compiled(path, config)
    over_dc = [each for each in figures["messages"] if "dc" in each["axes"].split(",")]
    # The flags and norms of a step are a few bytes over all axes: no bucket and no hop.
    payload = [each for each in over_dc if each["bytes_sent"] > 2**20]
    memory, estimate = figures["memory_bytes"]["total"], figures["estimated_memory_bytes"]
    plan = plan_of(config)
    shares = exposed(config, plan)
    missed = [] if figures["fits"] else ["fits"]
    if abs(estimate / memory - 1) > ESTIMATE_TOLERANCE:
        missed.append("estimate")
    missed += [name for name, limit in LIMITS.items() if (getattr(shares, name) or 0.0) > limit]
    sent = sum(each["bytes_sent"] for each in over_dc)
    planned = figures["planned"]
    if abs(sent / planned["bytes_between_sites"] - 1) > PLAN_TOLERANCE:
        missed.append("plan")
    seconds, peak = figures["compile_seconds"], figures["compile_peak_memory_bytes"]
    if seconds > MOST_SECONDS or peak > MOST_BYTES:
        missed.append("effort")
    beside = sum(each["bytes_beside_compute"] for each in over_dc)
    if plan.overlap_grad_reduce and plan.staged_layers is None and beside < LEAST_BESIDE * sent:
        missed.append("beside")
    return {
        "config": path.stem,
        "devices": config.mesh.devices,
        "compile_seconds": seconds,
        "compile_peak_memory_bytes": peak,
        "product_flops": figures["product_flops"],
        "planned": planned,
        "dc_bytes_of_a_device": sent,
        "dc_bytes_beside_compute": beside,
        "dc_messages_of_a_device": sum(each["count"] for each in payload),
        "streams": sorted({stream for each in figures["messages"] for stream in each["streams"]}),
        "dc_in_flight_with": sorted({axes for each in payload for axes in each["together"]}),
        "exposed": dataclasses.asdict(shares),
        "estimated_memory_bytes": estimate,
        "compiled_memory_bytes": memory,
        "missed": missed,
        "messages": figures["messages"],
    }


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    titles = (
        "config",
        "devices",
        "compiled in",
        "with",
        "sent over dc",
        "of the plan",
        "beside",
        "messages",
        "streams",
    )
    titles += ("latency", "sum", "hops", "estimated", "compiled", "missed")
    for title in titles:
        result.add_column(title, justify="left" if title in ("config", "missed") else "right")
    for row in rows:
        share = (row["exposed"][name] for name in LIMITS)
        result.add_row(
            row["config"],
            f"{row['devices']:,}",
            f"{row['compile_seconds']:.0f} s",
            quantity(row["compile_peak_memory_bytes"], "B"),
            quantity(float(row["dc_bytes_of_a_device"]), "B"),
            f"{row['dc_bytes_of_a_device'] / row['planned']['bytes_between_sites']:.1%}",
            f"{row['dc_bytes_beside_compute'] / row['dc_bytes_of_a_device']:.0%}",
            f"{row['dc_messages_of_a_device']:,}",
            ", ".join(row["streams"]),
            *("" if each is None else f"{each:.2%}" for each in share),
            quantity(row["estimated_memory_bytes"], "B"),
            quantity(row["compiled_memory_bytes"], "B"),
            ", ".join(row["missed"]),
        )
    return result


def with_kept(rows: list[dict[str, Any]], output: Path) -> list[dict[str, Any]]:
    """The rows, and those of other configs that `output` has already."""
    before = json.loads(output.read_text())["configs"] if output.exists() else []
    by_config = {row["config"]: row for row in [*before, *rows]}
    return [by_config[config] for config in sorted(by_config)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("configs", nargs="*", type=Path, help="default: all shipped two-site ones")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    arguments = parser.parse_args()
    console = Console(width=160, highlight=False, soft_wrap=True, markup=False)
    rows = []
    for path in arguments.configs or two_site_configs():
        with console.status(f"compiling {path.stem}"):
            rows.append(measured(path))
        console.print(f"{path.stem}: compiled", style="dim")
        if arguments.output is not None:
            machine = {"cores": os.cpu_count(), "python": platform.python_version()}
            machine["jax"] = importlib.metadata.version("jax")
            content = {"machine": machine, "configs": with_kept(rows, arguments.output)}
            arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(table(rows))
    return 1 if any(row["missed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
