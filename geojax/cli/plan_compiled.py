"""The section of `geojax plan --compile`: the real step, compiled ahead of time."""

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from geojax.cli.plan_tables import plain_table
from geojax.quantities import quantity

if TYPE_CHECKING:
    from geojax.config.run_config import RunConfig
    from geojax.planner.compile_target import CompileTarget
    from geojax.planner.compiled_step import CompiledStep, Messages
    from geojax.planner.resolve.planned_step import PlannedStep
    from geojax.planner.traffic.by_axes import Axes


def target_of(given: str | None, config: "RunConfig") -> "CompileTarget":
    """Return the accelerators to compile for: those given, or the config's.

    Raises:
        UserError: there are none, they cannot be compiled for, or the model has adapters.
    """
    from geojax.planner.compile_target import CompileTarget
    from geojax.planner.cost.adapters import refuse_adapters
    from geojax.planner.resolve.traced_run import accelerator_of_run

    if given is not None:
        target = CompileTarget.parse(given)
    else:
        simulated = config.simulate_devices is not None
        accelerator = None if simulated else accelerator_of_run(config)
        target = CompileTarget.of(accelerator, config.mesh.devices)
    target.require_compiler()
    refuse_adapters(config.model)
    return target


def print_compiled(
    config: "RunConfig", target: "CompileTarget", console: Console
) -> dict[str, Any]:
    """Compile the step of `config` for `target`, print what became of it, and return the figures.

    `fits` is false if the step does not fit into an accelerator's memory.

    Raises:
        UserError: the layout cannot be, or does not fit the target or the topology.
    """
    from geojax.planner.resolve.planned_step import PlannedStep
    from geojax.planner.resolve.traced_run import compile_run
    from geojax.runtime.device_memory import usable_memory

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
    return {
        "target": str(target),
        "fits": fits,
        **step.to_json(),
        "planned": planned.to_json(),
    }


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
    return plain_table(rows, left=("over", "collective", "stream", "in flight with"))


def _memory(step: "CompiledStep") -> str:
    parts = dataclasses.asdict(step.memory)
    sizes = " + ".join(f"{quantity(size, 'B')} {name}" for name, size in parts.items() if size)
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
    return plain_table(rows, left=titles[:1])


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
