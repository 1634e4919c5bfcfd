"""`geojax compile CONFIG --target h100:3072`: the real step, compiled ahead of time."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from geojax.cli.config_file import ConfigFile
from geojax.errors import UserError
from geojax.exit_codes import FAILURE
from geojax.quantities import quantity

if TYPE_CHECKING:
    from geojax.config.run_config import RunConfig
    from geojax.planner.compile_target import CompileTarget
    from geojax.planner.compiled_step import CompiledStep, Messages
    from geojax.planner.resolve.planned_step import PlannedStep
    from geojax.planner.traffic.by_axes import Axes


@dataclasses.dataclass(frozen=True)
class CompileCommand:
    """Compile the step of CONFIG for accelerators that this machine need not have.

    Prints the memory of a device beside the estimate of `geojax memory`. Prints the messages over
    each mesh axis, their streams, and what they overlap with. Then compares the step that `geojax
    plan` predicts with the compiled step. The exit code is 1 if the step does not fit into the
    accelerator's memory. Options change settings: `--zero.stage 3`.
    """

    config: ConfigFile
    """YAML file of the run."""

    target: Annotated[str | None, tyro.conf.arg(metavar="KIND:DEVICES")] = None
    """h100:3072, or cpu:8 for simulated devices. Default: the accelerators of CONFIG's topology.
    GPUs need the extra `aot` (jax[cuda13]), but no driver and no GPU."""

    json: Path | None = None
    """File for all figures."""


def run(command: CompileCommand, overrides: Sequence[str]) -> int:
    """Print the tables and return the exit code: 0 if the step fits, otherwise 1."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    import jax

    from geojax.planner.compile_target import CompileTarget

    target = None if command.target is None else CompileTarget.parse(command.target)
    if target is not None:
        target.require_compiler()

    from geojax.config.run_config import RunConfig
    from geojax.planner.cost.adapters import refuse_adapters
    from geojax.planner.resolve.planned_step import PlannedStep
    from geojax.planner.resolve.traced_run import accelerator_of_run, compile_run
    from geojax.runtime.device_memory import usable_memory

    config = RunConfig.load(command.config, overrides)
    refuse_adapters(config.model)
    if target is None:
        simulated = config.simulate_devices is not None
        accelerator = None if simulated else accelerator_of_run(config)
        target = CompileTarget.of(accelerator, config.mesh.devices)
        target.require_compiler()
    jax.config.update("jax_platforms", "cpu")  # no accelerator is touched
    jax.config.update("jax_enable_x64", config.precision == "fp64")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    with console.status(f"compiling the step for {target}"):
        step = compile_run(config, target)
    console.print(_compiled(config, target, step))
    console.print(_messages_table(step.messages))
    console.print(_memory(step))
    planned = PlannedStep.of(config, step.plan, step.traffic, target)
    console.print(_beside_plan(planned, step))
    if balanced := _balanced(planned):
        console.print(balanced)
    if note := _counted_once(step):
        console.print(note)
    if planned.untimed:
        console.print(f"the plan has no times: {planned.untimed}")
    usable = usable_memory(target.accelerator, os.environ)
    fits = usable is None or step.memory.bytes <= usable.bytes
    if usable is not None:
        console.print(
            f"the compiled step {'fits' if fits else 'does not fit'} into the "
            f"{quantity(usable.bytes, 'B')} that are usable of {usable.of}"
        )
    if command.json is not None:
        figures = {"config": str(command.config), "target": str(target), "fits": fits}
        _write(command.json, figures | step.to_json() | {"planned": planned.to_json()})
        console.print(f"{command.json}: all figures")
    return 0 if fits else FAILURE


def _compiled(config: "RunConfig", target: "CompileTarget", step: "CompiledStep") -> str:
    used = [f"{axis}={size}" for axis, size in config.mesh.model_dump().items() if size > 1]
    return (
        f"{' x '.join(used) or 'one device'} compiled for {target} in {step.seconds:.0f} s of this "
        f"machine, whose process took {quantity(step.peak_memory_bytes, 'B')}"
    )


def _messages_table(messages: "Sequence[Messages]") -> Table:
    """Tabulate the collectives of a device by axes and kind."""
    rows = []
    for each in messages:
        share = each.bytes_beside_compute / each.bytes_sent if each.bytes_sent else 0
        rows.append(
            {
                "over": " x ".join(each.axes) or "(none)",
                "collective": each.kind,
                "messages": f"{'>=' if each.at_least else ''}{each.count:,}",
                "sent by a device": quantity(float(each.bytes_sent), "B"),
                "beside compute": f"{float(share):.0%}",
                "stream": ", ".join(each.streams),
                "in flight with": ", ".join(each.together),
            }
        )
    return _table(rows, left=("over", "collective", "stream", "in flight with"))


def _table(rows: "Sequence[Mapping[str, str]]", left: "Sequence[str]") -> Table:
    """Tabulate rows as wide as their cells, wherever they are printed."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in rows[0] if rows else ():
        width = max(len(name), *(len(row[name]) for row in rows))
        justify: Literal["left", "right"] = "left" if name in left else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*row.values())
    return table


def _memory(step: "CompiledStep") -> str:
    parts = dataclasses.asdict(step.memory)
    sizes = " + ".join(f"{quantity(size, 'B')} {name}" for name, size in parts.items())
    return (
        f"memory of a device: {sizes} = {quantity(step.memory.bytes, 'B')}; estimated "
        f"{quantity(step.estimate.bytes, 'B')}, ratio {step.estimate_ratio:.3f}"
    )


def _beside_plan(planned: "PlannedStep", step: "CompiledStep") -> Table:
    """Tabulate a device's figures as planned and as compiled."""
    from geojax.planner.compiled_step import LEAST_PAYLOAD_BYTES

    titles = "of a device", "planned", "compiled", "ratio"
    rows = []

    def add(name: str, plan: float | None, compiled: float, unit: str) -> None:
        if plan:
            cells = quantity(plan, unit), quantity(compiled, unit), f"{compiled / plan:.3f}"
            rows.append(dict(zip(titles, (name, *cells), strict=True)))

    add("products with weights", planned.product_flops, step.products.flops, "FLOP")
    add("memory", planned.memory_bytes, step.memory.bytes, "B")
    for axes, count in planned.most_sent.items():
        if "dc" not in axes and count >= LEAST_PAYLOAD_BYTES:
            sent = sum(each.bytes_sent for each in step.messages if each.axes == axes)
            add(f"{_sent_over(axes, planned)} {' x '.join(axes)}", float(count), float(sent), "B")
    over_dc = [each for each in step.messages if "dc" in each.axes]
    sent_over_dc = sum(float(each.bytes_sent) for each in over_dc)
    add("sent over dc", planned.bytes_between_sites, sent_over_dc, "B")
    payloads = sum(each.payloads for each in over_dc)
    add("messages over dc", planned.messages_between_sites, payloads, "")
    if planned.hidden_share is not None and step.platform.name == "gpu":
        beside = sum(float(each.bytes_beside_compute) for each in over_dc) / sent_over_dc
        add("hidden over dc", 100 * planned.hidden_share, 100 * beside, "%")
    return _table(rows, left=titles[:1])


def _sent_over(axes: "Axes", planned: "PlannedStep") -> str:
    return "sent over" if planned.sent[axes] == planned.most_sent[axes] else "sent at most over"


def _balanced(planned: "PlannedStep") -> str | None:
    """Say what experts send that are equally busy; None where a program shows no more."""
    sent = [
        f"{quantity(float(count), 'B')} over {' x '.join(axes)}"
        for axes, count in planned.sent.items()
        if count != planned.most_sent[axes]
    ]
    if not sent:
        return None
    return (
        f"experts that are equally busy make a device send {' and '.join(sent)}; the rest are "
        "further exchanges, each run only if tokens need it"
    )


def _counted_once(step: "CompiledStep") -> str | None:
    """Say which figures are least ones, for loops whose length is data; None: none is."""
    least = [f"messages over {' x '.join(m.axes)}" for m in step.messages if m.at_least]
    if loops := len(step.products.unknown_loops):
        least.insert(0, f"products with weights ({loops} such loops)")
    if not least:
        return None
    return (
        "loops that run as often as data of the run say, as over an expert's tokens, count once, "
        f"so these figures are least ones: {', '.join(least)}"
    )


def _write(path: Path, figures: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
