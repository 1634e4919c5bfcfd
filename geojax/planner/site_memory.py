"""The memory that a step of a site takes on one device, from the programs of its walk.

What passes from one program to the next is counted by its shapes, what a program needs while it
runs by following its buffers, as for the step of one program.
"""

import math
from collections import Counter

import jax

from geojax.islands.programs.site_programs import SitePrograms
from geojax.planner.live_bytes import (
    XLA_ACCELERATOR,
    XLA_CPU,
    Accounting,
    Compiler,
    Snapshot,
    peaks,
)
from geojax.planner.memory import STATE_KINDS, StepMemory, program_of_device
from geojax.runtime.platform import platform_of

_UPDATE = "update"


def site_memory(programs: SitePrograms, activations: int, hops: int = 0) -> StepMemory:
    """Estimate the memory of a site with a runtime of its own, or of a stage of it.

    Nothing is compiled.

    Args:
        programs: the site's, or the stage's.
        activations: bytes that microbatches hold at once between their forwards and backwards.
        hops: messages from and to other stages that are held at once.
    """
    compiler = XLA_CPU if platform_of(programs.plan.mesh).host_devices else XLA_ACCELERATOR
    step = programs.step_bytes
    always = Counter(
        {
            "gathered weights": step.weights,
            "gradients": step.gradients,
            "communication": step.messages + hops * (programs.hop_bytes if hops else 0),
        }
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(programs.layouts):
        kind = STATE_KINDS.get(path[0].name, "batch, counters")
        always[kind] += math.prod(leaf.shard_shape) * leaf.dtype.itemsize
    phases: dict[str, Snapshot] = {}
    for phase, traced in programs.traced():
        kind = "optimizer update" if phase == _UPDATE else "layer workspace"
        by_kind = always + Counter({kind: workspace(traced, compiler)})
        if phase in ("forward", "backward"):
            by_kind += Counter({"activations": activations})
        if phase not in phases or by_kind.total() > phases[phase].bytes:
            phases[phase] = Snapshot(by_kind.total(), by_kind)
    return StepMemory(phases)


def workspace(traced: jax.stages.Traced, compiler: Compiler) -> int:
    """Return the bytes that a program holds at its peak beside arguments and results."""
    program, _ = program_of_device(traced.jaxpr.jaxpr)
    accounting = Accounting(lambda *_: "", lambda _: "", compiler)
    (peak,) = peaks(program, accounting).values()
    outside = {*program.inputs, *(each for each in program.outputs if each is not None)}
    return max(peak.bytes - sum(each.bytes for each in outside), 0)
