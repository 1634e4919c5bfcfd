"""A run's memory compared with its devices' before anything is compiled, and what would fit.

The estimate is that of `geojax plan`: the step is traced on a mesh without devices, which takes
seconds for any number of them.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from geojax.accelerators import Accelerator, accelerator_of
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.planner.memory import StepMemory, TracedStep
from geojax.planner.resolve.run_memory import run_memory
from geojax.planner.resolve.traced_run import accelerator_of_run
from geojax.quantities import quantity
from geojax.runtime.device_memory import UsableMemory, usable_memory
from geojax.settings import validate
from geojax.step.resolved import MemoryVerdict

Changes = dict[str, Any]
"""Settings by their dotted names, as on the command line."""

_SHOWN = 3
"""Most uses of memory, and most ways out, that a line names."""

_QUIET_SECONDS = 10
"""Longest time of a search without a line about it, but for the trace that is under way."""

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
        log: told of a long search for settings that would fit.
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
    memory = traced.memory() if traced is not None else run_memory(config, accelerator)
    return Preflight(judge(config, memory, accelerator, os.environ, log), memory)


def judge(
    config: RunConfig,
    memory: StepMemory,
    accelerator: Accelerator,
    environment: Mapping[str, str],
    log: Log = _unheard,
) -> MemoryVerdict:
    """Compare the memory that a step of `config` takes with the usable one of `accelerator`.

    Where it does not fit, a long search for settings that would tells `log` of its progress.
    """
    usable = usable_memory(accelerator, environment)
    if usable is None:
        return MemoryVerdict()
    if memory.bytes <= usable.bytes:
        return MemoryVerdict(
            kind="fits",
            line=f"a step needs about {quantity(memory.bytes, 'B')} on a device, {_room(usable)}",
        )
    line = f"a step needs about {quantity(memory.bytes, 'B')} on a device ({_largest(memory)}), "
    ways = ways_out(config, accelerator, usable.bytes, log)
    return MemoryVerdict(kind="does not fit", line=f"{line}{_room(usable)}; {ways}")


def _room(usable: UsableMemory) -> str:
    return f"and {quantity(usable.bytes, 'B')} of {usable.of} are usable"


def _largest(memory: StepMemory) -> str:
    uses = memory.by_kind.most_common(_SHOWN)
    return ", ".join(f"{kind} {quantity(held, 'B')}" for kind, held in uses)


def ways_out(
    config: RunConfig, accelerator: Accelerator | None, usable: int, log: Log = _unheard
) -> str:
    """Say which other settings of the same run on the same mesh would fit into `usable` bytes.

    Each change is tried alone, those that cost least time first; if none is enough, one after the
    other is added while that saves memory.
    """
    told = time.monotonic()

    def peak_with(changes: Changes) -> int | None:
        nonlocal told
        if time.monotonic() - told > _QUIET_SECONDS:
            log(f"the step does not fit; trying {_settings(changes) or 'it as it is'}")
            told = time.monotonic()
        return _peak(config, changes, accelerator)

    fitting: list[str] = []
    for change in _changes(config):
        peak = peak_with(change)
        if peak is not None and peak <= usable:
            fitting.append(_shown(change, peak))
        if len(fitting) == _SHOWN:
            break
    if fitting:
        return f"would fit: {' or '.join(fitting)}"
    together: Changes = {}
    least = peak_with(together)
    for change in _changes(config):
        peak = peak_with(together | change)
        if peak is None or least is None or peak >= least:
            continue
        together, least = together | change, peak
        if peak <= usable:
            return f"would fit: {_shown(together, peak)}"
    tried = (
        f"{_shown(together, least)} is the least of what was tried; " if together and least else ""
    )
    return f"{tried}more devices, or a larger tensor or stage axis, would be needed"


def _changes(config: RunConfig) -> Iterator[Changes]:
    """Yield changes of one setting each that can save memory, those that cost least time first."""
    if config.mesh.tensor > 1 and not config.parallelism.sequence:
        yield {"parallelism.sequence": True}
    ranks = config.mesh.data * config.mesh.expert
    ranks *= config.mesh.dc if config.dc.role == "data" else 1
    most = config.batch.global_batch_size // ranks
    if config.batch.microbatches < most:
        yield {"batch.microbatches": most}
    if config.pipeline_stages > 1:
        for schedule in ("branch_free", "1f1b"):
            if schedule != config.pipeline.schedule:
                yield {
                    "pipeline.schedule": schedule,
                    "pipeline.virtual_stages": 1,
                    "pipeline.layers": None,
                }
    stages = (1,) if config.pipeline_stages > 1 else (1, 2, 3)
    yield from ({"zero.stage": stage} for stage in stages if stage > config.zero.stage)
    remats = ("none", "selective", "full")
    yield from ({"remat": remat} for remat in remats[remats.index(config.remat) + 1 :])


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
