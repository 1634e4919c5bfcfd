"""A process of geojax: the step that `geojax train` compiles."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from geojax import runtime
from geojax.cache import cache_folder
from geojax.config.run_config import RunConfig
from geojax.planner.resolve.resolve import resolve
from geojax.settings import validate
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.config_plan import make_run_mesh, step_plan
from geojax.step.plan import SIGNALS
from geojax.train.compiled_run import CompiledRun
from wan_sides.jax_process import PATIENCE_SECONDS, join
from wan_sides.serving import own_work, serve, take_steps
from wan_sides.work import (
    MICROBATCHES,
    MODEL,
    OPTIMIZER,
    ROWS,
    SEED,
    SEQUENCE,
    STEPS,
    batch,
    layers_of_chunks,
)


def run_config(settings: dict[str, Any], repeats: int) -> RunConfig:
    """The run of a contestant with these settings, whose steps repeat the batch."""
    pipeline = settings.get("pipeline")
    staged = {}
    if pipeline:
        stages = 2 * settings.get("mesh", {}).get("stage", 1)
        layers = layers_of_chunks(stages * pipeline.get("virtual_stages", 1))
        dc = settings.get("dc", {}) | {"role": "stage"}
        staged = {"dc": dc, "pipeline": pipeline | {"layers": layers}}
    content = {
        "run_directory": Path("unused"),
        "steps": STEPS,
        "seed": SEED,
        "mesh": {"dc": 2},
        "model": MODEL,
        "data": {},
        "batch": {
            "global_batch_size": repeats * ROWS,
            "sequence_length": SEQUENCE,
            "microbatches": repeats * MICROBATCHES if pipeline else repeats,
        },
        "precision": "fp32",
        "optimizer": OPTIMIZER,
    }
    return validate(RunConfig, content | settings | staged, "benchmark")


def bytes_over_link(program: CompiledRun) -> float:
    """What a step sends, both directions together."""
    ticks = program.plan.tick_program
    if ticks is None:
        sent = program.links.sent_bytes
        return 0.0 if sent is None else 2 * sent
    # Each pair of a permute is one message; an idle stage's is sent too.
    stream = 4 * (ROWS // MICROBATCHES) * SEQUENCE * MODEL["hidden_size"]
    messages = sum(
        len(ticks.channels[number].pairs)
        for segment in ticks.segments
        for _, form in segment.ticks()
        for number in form.channels
    )
    return stream * messages


class Worker:
    def start(self) -> dict[str, Any]:
        work = own_work()
        join(work)
        runtime.enable_compilation_cache(cache_folder() / "xla")
        repeats = work["repeats"]
        config = run_config(work["settings"], repeats)
        mesh = make_run_mesh(config)
        step = resolve(config, config.load_topology(), jax.devices())
        plan = step_plan(config, step, mesh)
        program = CompiledRun.build(config, step, plan)
        rows = sequences_of_process(plan, repeats * ROWS)
        local = {name: values[rows] for name, values in batch(repeats).items()}
        self.batch = global_batch(plan, repeats * ROWS, rows, local)
        self.signals = global_signals(plan, dict.fromkeys(SIGNALS, False))
        self.step = program.step_program
        self.state = program.initial_state()
        runtime.barrier("ready", timeout_seconds=PATIENCE_SECONDS)
        return {
            "formula_bytes": bytes_over_link(program),
            "versions": {"jax": jax.__version__},
        }

    def one_step(self) -> float:
        made = self.step(self.state, self.batch, self.signals, np.uint32(SEED))
        self.state, metrics = jax.block_until_ready(made)
        return float(metrics["loss"])

    def steps(self, count: int) -> dict[str, Any]:
        return take_steps(self.one_step, count)


if __name__ == "__main__":
    worker = Worker()
    serve({"start": worker.start, "steps": worker.steps})
