"""What a pipeline's executor adds to a step: every schedule, beside the step without a pipeline.

    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
    taskset -c 0,1 python benchmarks/pipeline.py --output benchmarks/results/pipeline.json

Two sites of two stages train a Llama through both of them, on 8 simulated devices (two for each
stage); between the sites a message has two ticks. The other side is the same step without stages:
the same microbatches, each on one of the 8 devices, the same rematerialization, the same devices.
Before any timing all sides train three steps and must agree on the losses. Then they take turns, a
step each in rotating order, and a ratio is the median over the rounds.

Simulated devices share the machine's cores, so that a stage that waits leaves its core to others.
Bubbles are therefore not seen here (`geojax plan --schedules` says how long they are). What is seen
is work that the step without a pipeline does not do: sending, putting away what waits, branches.
And, in the form without branches, the work of idle stages on what nobody reads: with m microbatches
and d ticks from the first stage to the last it makes d / m of all work.

The products are as wide as compute-bound ones are. Beside narrow ones
(`--hidden 256 --sequences 2`) it shows that what waits for the backward comes from memory where a
pipeline holds many microbatches. A pipeline's devices reduce the gradients of their own stage
alone, so that a step may also take less than one without. Huge pages, as `launch/quickstart` asks
for, spare all sides the faults of memory that XLA takes anew for each step.
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table

from geojax import make_mesh
from geojax.config.layout import Layout
from geojax.config.layout_sections import BatchSettings, MeshSettings
from geojax.config.pipeline_settings import DcSettings
from geojax.models import ModelConfig, parameter_count
from geojax.models.chunk.remat import Remat
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.pipeline import SCHEDULES, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import policy
from geojax.runtime import simulate_devices
from geojax.step.batches import global_batch, global_signals
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.program import batch_shape, lower_step
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import initial_state, state_layouts

SITES, STAGES_PER_SITE, DATA = 2, 2, 2
STAGES, DEVICES = SITES * STAGES_PER_SITE, SITES * STAGES_PER_SITE * DATA
HOP_TICKS = 2
LAYERS, SEED = 8, 0
SETTINGS, STEPS = OptimizerSettings(warmup_steps=0), 100
WITH_BRANCHES_GOAL, SURPLUS_TOLERANCE, TICK_SECONDS = 1.15, 0.10, 0.020
CHECKED_STEPS, LOSS_TOLERANCE = 3, 1e-4


@dataclasses.dataclass(frozen=True)
class Work:
    """What every side computes."""

    hidden: int
    sequence: int
    sequences: int
    """Of a microbatch on one device."""
    microbatches: int
    """Of the pipeline; a device without one has its share of them."""
    remat: Remat

    @property
    def model(self) -> ModelConfig:
        # The head is small: it lies on one stage, and no idle one computes it.
        return ModelConfig(
            num_hidden_layers=LAYERS,
            hidden_size=self.hidden,
            num_attention_heads=self.hidden // 32,
            intermediate_size=self.hidden * 11 // 4,
            vocab_size=512,
            max_position_embeddings=self.sequence,
        )

    @property
    def all_sequences(self) -> int:
        return self.microbatches * self.sequences * DATA

    def shares(self, microbatches: int) -> BatchSettings:
        """The batch in so many microbatches of each rank."""
        return BatchSettings(
            global_batch_size=self.all_sequences,
            sequence_length=self.sequence,
            microbatches=microbatches,
        )

    def batch(self) -> dict[str, np.ndarray]:
        """Random tokens, one document a sequence; the same batch every step."""
        shape = (self.all_sequences, self.sequence)
        tokens = np.random.default_rng(SEED).integers(
            self.model.vocab_size, size=(shape[0], shape[1] + 1), dtype=np.int32
        )
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "loss_mask": np.ones(shape, np.float32),
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.broadcast_to(np.arange(self.sequence, dtype=np.int32), shape),
            "row": np.arange(self.all_sequences, dtype=np.int32),
        }


class Runner:
    """One side's compiled step, and its state."""

    def __init__(self, work: Work, plan: StepPlan):
        optimizer, schedule = (
            make_optimizer(SETTINGS, STEPS),
            learning_rate_schedule(SETTINGS, STEPS),
        )
        layouts = state_layouts(work.model, optimizer, plan)
        shapes = batch_shape(work.all_sequences, work.sequence)
        step = lower_step(layouts, work.model, plan, optimizer, schedule, shapes).compile()
        self._step = step
        self._batch = global_batch(
            plan, work.all_sequences, range(work.all_sequences), work.batch()
        )
        self._signals = global_signals(plan, dict.fromkeys(SIGNALS, False))
        self._state = initial_state(work.model, optimizer, layouts, plan, SEED)

    def run(self) -> tuple[float, float]:
        """Seconds of a step, and its loss."""
        start = time.perf_counter()
        made = self._step(self._state, self._batch, self._signals, np.uint32(SEED))
        self._state, metrics = jax.block_until_ready(made)
        return time.perf_counter() - start, float(metrics["loss"])


def without_pipeline(work: Work) -> StepPlan:
    sizes = MeshSettings(dc=SITES, data=STAGES_PER_SITE * DATA)
    layout = Layout(mesh=sizes, batch=work.shares(work.microbatches // STAGES), remat=work.remat)
    return StepPlan(make_mesh(**sizes.model_dump()), policy("fp32"), layout)


def pipeline(work: Work, name: str, *, branch_free: bool) -> StepPlan:
    """The schedule of that name through both sites."""
    entry = SCHEDULES[name]
    placement = entry.placement([STAGES_PER_SITE] * SITES, entry.virtual_stages or 2)
    sites = [stage // STAGES_PER_SITE for stage in placement.stage_of]
    hops = [1 if a == b else HOP_TICKS for a, b in itertools.pairwise(sites)]
    table = tick_table(name, placement, work.microbatches, hops)
    staged = StagedLayers(placement, (LAYERS // placement.chunks,) * placement.chunks)
    sizes = MeshSettings(dc=SITES, stage=STAGES_PER_SITE, data=DATA)
    return StepPlan(
        make_mesh(**sizes.model_dump()),
        policy("fp32"),
        Layout(
            mesh=sizes,
            dc=DcSettings(role="stage"),
            batch=work.shares(work.microbatches),
            remat=work.remat,
        ),
        staged_layers=staged,
        tick_program=TickProgram.of(table, branch_free=branch_free),
    )


def plans(work: Work) -> dict[str, StepPlan]:
    """All sides but the one without a pipeline, by name."""
    sides = {"branch_free": pipeline(work, "branch_free", branch_free=True)}
    for name in SCHEDULES:
        label = "branch_free, with branches" if name == "branch_free" else name
        sides[label] = pipeline(work, name, branch_free=False)
    return sides


def measure(work: Work, only: list[str] | None, rounds: int, status: Any) -> list[dict[str, Any]]:
    chosen = {name: plan for name, plan in plans(work).items() if not only or name in only}
    runners = {}
    for name, plan in {"no pipeline": without_pipeline(work), **chosen}.items():
        status.update(f"compiling {name} ...")
        runners[name] = Runner(work, plan)
    status.update("checking the losses ...")
    losses = {
        name: [runner.run()[1] for _ in range(CHECKED_STEPS)] for name, runner in runners.items()
    }
    if not np.max(np.ptp(list(losses.values()), axis=0)) <= LOSS_TOLERANCE:
        raise SystemExit(f"the sides do not train the same model, losses are {losses}")
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for turn in range(rounds):
        status.update(f"round {turn + 1} of {rounds} ...")
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(runners[name].run()[0])
    plain = seconds["no pipeline"]
    return [
        {
            "schedule": name,
            "branch_free": name == "branch_free",
            **_of_table(chosen.get(name)),
            "losses": losses[name],
            "median_seconds": statistics.median(own),
            "ratio": statistics.median(a / b for a, b in zip(own, plain, strict=True)),
            "ratio_of_fastest": min(own) / min(plain),
            "seconds": own,
        }
        for name, own in seconds.items()
    ]


def _of_table(plan: StepPlan | None) -> dict[str, Any]:
    if plan is None or plan.tick_program is None:
        return {}
    table = plan.tick_program.ticks
    return {
        "hop_ticks": table.hop_ticks,
        "ticks": table.ticks,
        "in_flight": max(table.schedule.in_flight),
        "split_backward": table.schedule.split_backward,
    }


def tick_seconds(work: Work, results: list[dict[str, Any]]) -> float:
    """A forward and a backward on all stages, of a microbatch each: what the machine takes."""
    plain = next(result for result in results if result["schedule"] == "no pipeline")
    seconds: float = plain["median_seconds"]
    return seconds / work.microbatches


def show(console: Console, work: Work, results: list[dict[str, Any]]) -> None:
    tick = tick_seconds(work, results)
    console.print(
        f"{parameter_count(work.model) / 1e6:.1f}M parameters, fp32, remat {work.remat}; "
        f"{work.microbatches} microbatches of {DATA} x {work.sequences} sequences of "
        f"{work.sequence} tokens, each {1e3 * tick:.0f} ms; {DEVICES} simulated devices on "
        f"{len(os.sched_getaffinity(0))} cores"
    )
    table = Table(box=rich.box.HORIZONTALS)
    table.add_column("schedule", no_wrap=True)
    for heading in ("ticks", "in flight", "ms", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result["schedule"],
            str(result.get("ticks", "-")),
            str(result.get("in_flight", "-")),
            f"{1e3 * result['median_seconds']:.0f}",
            f"{result['ratio']:.3f}",
        )
    console.print(table)
    if tick < TICK_SECONDS:
        console.print(f"a tick is shorter than {1e3 * TICK_SECONDS:.0f} ms: nothing is said by it")
    with_branches = [
        result for result in results if "ticks" in result and not result["branch_free"]
    ]
    if with_branches:
        slowest = max(with_branches, key=lambda result: result["ratio"])
        console.print(
            f"with branches at most {slowest['ratio']:.3f} ({slowest['schedule']}; goal: at most "
            f"{WITH_BRANCHES_GOAL})"
        )
    for result in results:
        if result["branch_free"]:
            expected = sum(result["hop_ticks"]) / work.microbatches
            console.print(
                f"without branches {result['ratio'] - 1:.3f} more than without a pipeline, "
                f"{expected:.3f} expected of idle stages (goal: within "
                f"{SURPLUS_TOLERANCE:.0%} of it)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="steps that each side is timed for")
    parser.add_argument("--microbatches", type=int, default=16, help="of a step of the pipeline")
    parser.add_argument("--sequences", type=int, default=4, help="of a microbatch on one device")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--remat", default="none", choices=("none", "selective", "full"))
    parser.add_argument(
        "--only", nargs="+", metavar="SCHEDULE", help="just these rows of the table"
    )
    parser.add_argument("--output", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.microbatches % STAGES:
        parser.error(f"--rounds must be at least 1, --microbatches a multiple of {STAGES}")

    simulate_devices(DEVICES)
    console = Console(width=120)
    work = Work(
        hidden=arguments.hidden,
        sequence=arguments.sequence,
        sequences=arguments.sequences,
        microbatches=arguments.microbatches,
        remat=arguments.remat,
    )
    with console.status("") as status:
        results = measure(work, arguments.only, arguments.rounds, status)
    show(console, work, results)
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "cores": len(os.sched_getaffinity(0)),
            "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
            "python": platform.python_version(),
            "versions": {
                name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")
            },
            "model": work.model.model_dump(exclude_unset=True),
            **dataclasses.asdict(work),
            "hop_ticks_between_sites": HOP_TICKS,
            "tick_seconds": tick_seconds(work, results),
            "results": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
