"""A run's memory compared with its devices' before anything is compiled, and what would fit.

The estimate is that of `geojax plan`: the step is traced on a mesh without devices, which takes
seconds for any number of them.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from geojax.accelerators import Accelerator, accelerator_of
from geojax.config.layout import Layout
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.memory import layout_memory
from geojax.planner.memory import TracedStep
from geojax.planner.memory_phases import StepMemory, estimate_error
from geojax.planner.resolve.run_layout import layout_of_run
from geojax.planner.resolve.run_memory import run_memory
from geojax.planner.resolve.run_prediction import predict_run
from geojax.planner.resolve.traced_run import accelerator_of_run
from geojax.planner.search.same_mesh import on_same_mesh
from geojax.quantities import quantity
from geojax.runtime.device_memory import UsableMemory, usable_memory
from geojax.settings import leaves_by_key, validate
from geojax.step.resolved import MemoryVerdict

Changes = dict[str, Any]
"""Settings by their dotted names, as on the command line."""

_SHOWN = 3
"""Most uses of memory, and most ways out, that a line names."""

_TRACED = 6
"""Most layouts that are traced to see if they fit; each takes seconds."""

Log = Callable[[str], None]


def _unheard(line: str) -> None:
    """Drop a line about the progress of a search."""


class Preflight(NamedTuple):
    """The memory of a step, and its comparison with that of a device."""

    verdict: MemoryVerdict
    memory: StepMemory | None = None
    """None: there is no device to compare with, or no step to estimate."""


def preflight(
    config: RunConfig,
    devices: Sequence[jax.Device],
    log: Log = _unheard,
    traced: TracedStep | None = None,
) -> Preflight:
    """Compare the step of `config` with the memory of `devices`, or of those that it is meant for.

    A config for accelerators that this machine does not have is compared with those of its
    topology. As many CPU devices as the mesh has simulate them: then nothing is compared.

    Args:
        config: the run.
        devices: those of this runtime.
        log: told which settings are tried where it does not fit.
        traced: the step of one program, if it is traced already.
    """
    accelerator = accelerator_of(devices[0])
    sites = config.mesh.dc if config.dc.join == "islands" else 1
    if accelerator is None or accelerator.memory_bytes is None:
        if len(devices) * sites == config.mesh.devices or config.simulate_devices is not None:
            return Preflight(MemoryVerdict())
        accelerator = accelerator_of_run(config)
    if accelerator is None:
        return Preflight(MemoryVerdict())
    memory = traced.memory if traced is not None else run_memory(config, accelerator)
    return Preflight(judge(config, memory, accelerator, os.environ, log), memory)


def judge(
    config: RunConfig,
    memory: StepMemory,
    accelerator: Accelerator,
    environment: Mapping[str, str],
    log: Log = _unheard,
) -> MemoryVerdict:
    """Compare the memory that a step of `config` takes with the usable one of `accelerator`.

    It does not fit if that is less than the estimate minus its error, and may not fit within it.
    Where it does not fit, `log` is told which settings are tried.
    """
    usable = usable_memory(accelerator, environment)
    if usable is None:
        return MemoryVerdict()
    needed = f"a step needs about {quantity(memory.bytes, 'B')} on a device"
    error = estimate_error(config.model)
    if memory.bytes * (1 + error) <= usable.bytes:
        return MemoryVerdict(kind="fits", line=f"{needed}, {_room(usable)}")
    if memory.bytes * (1 - error) <= usable.bytes:
        within = f"which is within the estimate's error of {error:.0%}"
        return MemoryVerdict(kind="may not fit", line=f"{needed}, {_room(usable)}, {within}")
    line = f"{needed} ({_largest(memory)}), "
    ways = what_would_fit(config, accelerator, usable.bytes, log)
    return MemoryVerdict(kind="does not fit", line=f"{line}{_room(usable)}; {ways}")


def _room(usable: UsableMemory) -> str:
    return f"and {quantity(usable.bytes, 'B')} of {usable.of} are usable"


def _largest(memory: StepMemory) -> str:
    uses = memory.by_use.most_common(_SHOWN)
    return ", ".join(f"{kind} {quantity(held, 'B')}" for kind, held in uses)


def what_would_fit(
    config: RunConfig, accelerator: Accelerator | None, usable: int, log: Log = _unheard
) -> str:
    """Say which other settings of the same run on the same mesh would fit into `usable` bytes.

    The closed form of the search chooses what to trace: those with the fewest changes first, and
    of these the fastest where the cost model knows enough. What is named fits by its trace.
    """
    own = layout_of_run(config)
    device_bytes = (accelerator and accelerator.memory_bytes) or math.inf
    estimated = {
        layout: layout_memory(
            config.model, layout, device_bytes=device_bytes, optimizer=config.optimizer
        ).bytes
        for layout in on_same_mesh(config.model, own)
    }
    found = [
        (_changes(own, layout), layout) for layout, held in estimated.items() if held <= usable
    ]
    seconds = _seconds_of(config)
    found.sort(key=lambda each: (len(each[0]), seconds(each[1])))
    shown: list[str] = []
    for changes, _ in found[:_TRACED]:
        if not changes:
            continue
        log(f"the step does not fit; trying {_settings(changes)}")
        peak = _peak(config, changes, accelerator)
        if peak is not None and peak <= usable:
            shown.append(_shown(changes, peak))
        if len(shown) == _SHOWN:
            break
    if shown:
        return f"would fit: {' or '.join(shown)}"
    least = min(estimated, key=lambda layout: estimated[layout])
    tried = ""
    if least != own:
        held = quantity(estimated[least], "B")
        tried = f"{_settings(_changes(own, least))} takes least, about {held}; "
    return f"{tried}more devices, or a larger tensor or stage axis, would be needed"


def _changes(own: LayoutCandidate, other: LayoutCandidate) -> Changes:
    """Return the settings in which another layout differs."""
    before, after = (
        dict(leaves_by_key(each.model_dump(include=set(Layout.model_fields))))
        for each in (own, other)
    )
    return {name: value for name, value in after.items() if before[name] != value}


def _seconds_of(config: RunConfig) -> Callable[[LayoutCandidate], float]:
    """Return a function that predicts the step of a layout; 0 where too little is known."""
    topology = config.load_topology()

    def seconds(layout: LayoutCandidate) -> float:
        if topology is None:
            return 0.0
        try:
            return predict_run(config, topology, layout).step_seconds
        except UserError:
            return 0.0

    return seconds


def _peak(config: RunConfig, changes: Changes, accelerator: Accelerator | None) -> int | None:
    """Estimate the peak of the changed run; None: it cannot be."""
    content = config.model_dump(exclude_unset=True)
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        group = content.setdefault(section, {}) if section else content
        group[key] = value
    try:
        changed = validate(RunConfig, content, "preflight")
        return run_memory(changed, accelerator).bytes
    except UserError:
        return None


def _shown(changes: Changes, peak: int) -> str:
    return f"{_settings(changes)} ({quantity(peak, 'B')})"


def _settings(changes: Changes) -> str:
    return " ".join(
        f"--{name} {str(value).lower()}" for name, value in changes.items() if value is not None
    )
