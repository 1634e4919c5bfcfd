"""geojax's side: the step that `geojax train` compiles, on a mesh of one device."""

import contextlib
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from work import (
    OPTIMIZER,
    answer,
    full_works,
    peak_resident_bytes,
    text,
    time_blocks,
    toy_works,
)

from geojax.accelerators import accelerator_of
from geojax.config.layout import Layout
from geojax.config.layout_sections import BatchSettings
from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.models import ModelConfig, parameter_count
from geojax.models.flops import model_flops
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import predict
from geojax.planner.memory import CompiledMemory, step_memory
from geojax.planner.resolve.choices import scans_layers
from geojax.precision import RECIPES, Backend, chosen_backend, policy
from geojax.runtime import apply_xla_flags, flags_in_force
from geojax.runtime.platform import platform_of
from geojax.runtime.xla_flags import expected_platform
from geojax.step.plan import StepPlan
from geojax.step.program import batch_on_mesh, batch_shape, lower_step, signals_on_mesh
from geojax.step.state import initial_state, state_layouts
from geojax.topology import Site, Topology

FOREVER = 1_000_000
"""Steps of the schedule: its end is far away."""

PROFILED_STEPS = 3
KERNELS = {
    "products": ("nvjet", "gemm", "cutlass"),
    "attention": ("sdpa", "cudnn"),
    "casts to FP8": ("transformer_engine",),
    "fills and copies": ("memcpy", "memset", "broadcast"),
    "slices of stacked layers": ("dynamic_slice", "dynamic_update_slice"),
    "optimizer": ("select_fusion",),
}
"""Kinds of kernels by parts of their names, the first that fits."""

FP8_PRODUCT = "__cublas$lt$matmul$f8"
"""What XLA calls cuBLASLt's product of FP8 numbers."""


def describe(asked: dict[str, Any]) -> dict[str, Any]:
    """The device, what is trained on it, and in which ways.

    Args:
        asked: `toy`, whether to train the toy on a GPU too; `layers` of the 8B shape, or None.
    """
    device = jax.devices()[0]
    accelerator = accelerator_of(device)
    memory = (device.memory_stats() or {}).get("bytes_limit")
    toy = asked["toy"] or device.platform != "gpu" or memory is None
    works = toy_works() if toy else full_works(memory, asked["layers"])
    for work in works.values():
        model = ModelConfig(**work["model"])
        work["parameters"] = parameter_count(model)
        work["flops_per_token"] = model_flops(model, work["sequence"])
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "memory_bytes": memory,
        "peak_flops_per_second": accelerator and accelerator.peak("bfloat16"),
        "works": works,
        "sides": sides(),
    }


def sides() -> dict[str, dict[str, str]]:
    """Every way to train with weights of 16 bits, by what the table calls it: options of a work."""
    found = {}
    for name in ("bf16", "fp16", *(f"fp8-{recipe}" for recipe in RECIPES)):
        recipe = policy(name).recipe
        if recipe is None:
            found[name] = {"precision": name}
            continue
        for backend in get_args(Backend):
            with contextlib.suppress(UserError):
                chosen_backend(recipe, jax.default_backend(), backend)
                found[f"{name} {backend}"] = {"precision": name, "backend": backend}
    return found


def measure(work: dict[str, Any]) -> dict[str, Any]:
    """Train, and say how long steps took and what they held."""
    model = ModelConfig(**work["model"])
    settings = OptimizerSettings(**OPTIMIZER)
    backend = {"fp8_backend": work["backend"]} if "backend" in work else {}
    sizes = BatchSettings(global_batch_size=work["rows"], sequence_length=work["sequence"])
    chosen = {name: work[name] for name in ("remat", "precision", "scan_layers")}
    layout = Layout(batch=sizes, **chosen)
    mesh = make_mesh(devices=jax.devices()[:1])
    layout = layout.changed(scan_layers=scans_layers(layout, model, platform_of(mesh)))
    plan = StepPlan(mesh, policy(work["precision"]), layout, **backend)
    optimizer = make_optimizer(settings, FOREVER)
    schedule = learning_rate_schedule(settings, FOREVER)
    layouts = state_layouts(model, optimizer, plan)
    shapes = batch_shape(work["rows"], work["sequence"])
    lowered = lower_step(layouts, model, plan, optimizer, schedule, shapes)
    begin = time.perf_counter()
    program = lowered.compile(compiler_options=plan.compiler_options)
    compile_seconds = time.perf_counter() - begin
    on_gpu = plan.mesh.devices.flat[0].platform == "gpu"
    if on_gpu and work.get("backend") == "xla" and FP8_PRODUCT not in program.as_text():
        raise RuntimeError("XLA has left no FP8 product in the program")
    state = initial_state(model, optimizer, layouts, plan, seed=0)
    place = batch_on_mesh(shapes, plan)
    batches = [
        jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), batch, place)
        for batch in map(single_documents, text(work))
    ]
    asked = signals_on_mesh(plan)
    signals = jax.device_put(jnp.zeros(asked.shape, asked.dtype), asked.sharding)

    def step(number: int) -> jax.Array:
        nonlocal state
        state, metrics = program(state, batches[number], signals, np.uint32(0))
        return metrics["loss"]

    measured = time_blocks(work, step, lambda losses: [float(x) for x in jax.device_get(losses)])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([step(number) for number in range(PROFILED_STEPS)])
        kernel_seconds = seconds_by_kind(Path(folder))
    memory = jax.devices()[0].memory_stats() or {}
    return measured | {
        "peak_bytes": memory.get("peak_bytes_in_use") or peak_resident_bytes(),
        "compiled_bytes": CompiledMemory.of(program).bytes,
        "estimated_bytes": step_memory(model, plan, layouts, shapes).bytes,
        "predicted_seconds": predicted_seconds(model, layout, settings),
        "compile_seconds": compile_seconds,
        "kernel_seconds": kernel_seconds,
        "parameters": parameter_count(model),
        "versions": {"jax": jax.__version__},
        "flags": flags_in_force(),
    }


def seconds_by_kind(folder: Path) -> dict[str, float]:
    """Return the time of a GPU's kernels in a step by kind, of the profile in `folder`."""
    seconds: Counter[str] = Counter()
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            streams = (line for line in plane.lines if line.name.startswith("Stream"))
            for stream in streams if "GPU" in plane.name else ():
                for event in stream.events:
                    seconds[kind_of(event.name)] += event.duration_ns / 1e9 / PROFILED_STEPS
    return dict(seconds.most_common())


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name, which XLA, cuBLAS or cuDNN gave it."""
    for kind, parts in KERNELS.items():
        if any(part in kernel.lower() for part in parts):
            return kind
    return "other fusions"


def predicted_seconds(
    model: ModelConfig, layout: Layout, settings: OptimizerSettings
) -> float | None:
    """Return the planner's time of a step on this device; None where it knows no peak of it."""
    accelerator = accelerator_of(jax.devices()[0])
    if accelerator is None or accelerator.peak("bfloat16") is None:
        return None
    site = Site(name="here", hosts=1, accelerators_per_host=1, accelerator=accelerator)
    prediction = predict(
        model,
        LayoutCandidate.of(layout),
        Topology(name="one", sites=(site,)),
        calibration=Calibration(),
        optimizer=settings,
    )
    return prediction.step_seconds


def single_documents(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Rows [rows, sequence + 1] as a batch; each is one document."""
    rows, sequence = tokens.shape[0], tokens.shape[1] - 1
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((rows, sequence), np.float32),
        "segment_ids": np.ones((rows, sequence), np.int32),
        "positions": np.tile(np.arange(sequence, dtype=np.int32), (rows, 1)),
        "row": np.arange(rows, dtype=np.int32),
    }


if __name__ == "__main__":
    apply_xla_flags(expected_platform())
    answer({"describe": describe, "measure": measure})
