"""One training step of the same Llama in geojax and in PyTorch, on the CPU, side by side.

    python benchmarks/step_time.py --threads 2 --output benchmarks/results/step_time.json

The step is forward, backward, clipping by the global norm and AdamW, in fp32, on one device. Each
side runs in a process of its own, pinned to the same cores with the same number of threads; the
processes live side by side and take turns, so that a machine that slows down slows all of them.
PyTorch runs twice, eager and under `torch.compile`; geojax is compared with the faster one. Before
any timing all of them train three steps from the same weights and must agree on the losses. The
parts are timed by themselves, forward and backward; "rest" is what they leave of a step.

Needs PyTorch, which geojax does not: pip install torch==2.13.0
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from worker import BENCHMARKS, Worker, processor

WORKERS = BENCHMARKS / "step_time"

ROWS, SEQUENCE, VOCABULARY, HEAD_SIZE = 8, 256, 8192, 64
CONFIGURATIONS = {
    "d=512 L=4": {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1408},
    "d=256 L=6": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 704},
}
OPTIMIZER = {
    "peak_learning_rate": 3e-4,
    "final_learning_rate": 3e-4,
    "warmup_steps": 0,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}
REQUESTS = ("versions", "losses", "steps", "memory", "parts")
SIDES = ("geojax", "torch", "torch.compile")
PARTS = ("attention", "matrix products", "loss", "optimizer")
GOAL = 0.8
LOSS_TOLERANCE = 1e-5


def start(side: str, work: dict[str, Any]) -> Worker:
    """A process that holds one side's model and steps it when asked."""
    script = WORKERS / ("geojax_worker.py" if side == "geojax" else "torch_worker.py")
    work = work | {"compile": side == "torch.compile", "requests": REQUESTS}
    return Worker(side, script, json.dumps(work))


@contextlib.contextmanager
def running_workers(work: dict[str, Any]) -> Iterator[dict[str, Worker]]:
    workers: dict[str, Worker] = {}
    try:
        for side in SIDES:
            workers[side] = start(side, work)
            workers[side].ask("versions")  # geojax has written its weights once it answers
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def model_of(configuration: dict[str, int]) -> dict[str, Any]:
    return configuration | {
        "num_attention_heads": configuration["hidden_size"] // HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": SEQUENCE,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0},
    }


def write_batch(path: Path) -> None:
    """One batch of random text, each row one document; the same batch every step."""
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(ROWS, SEQUENCE + 1))
    np.savez(
        path,
        tokens=tokens[:, :-1].astype(np.int32),
        targets=tokens[:, 1:].astype(np.int32),
        loss_mask=np.ones((ROWS, SEQUENCE), np.float32),
        segment_ids=np.ones((ROWS, SEQUENCE), np.int32),
        positions=np.tile(np.arange(SEQUENCE, dtype=np.int32), (ROWS, 1)),
        row=np.arange(ROWS, dtype=np.int32),
    )


def check_losses(losses: dict[str, list[float]]) -> None:
    expected = np.array(losses["geojax"])
    for side, values in losses.items():
        difference = np.abs(np.array(values) / expected - 1).max()
        if not difference < LOSS_TOLERANCE:
            raise SystemExit(f"the losses of {side}, {values}, are not those of geojax, {expected}")


def measure(
    configuration: dict[str, int], arguments: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    work = {
        "threads": arguments.threads,
        "rows": ROWS,
        "sequence": SEQUENCE,
        "model": model_of(configuration),
        "optimizer": OPTIMIZER,
        "remat": arguments.remat,
        "weights": str(folder / "weights.npz"),
        "batch": str(folder / "batch.npz"),
    }
    write_batch(folder / "batch.npz")
    with running_workers(work) as workers:
        versions = {k: v for worker in workers.values() for k, v in worker.ask("versions").items()}
        losses = {side: worker.ask("losses", count=3) for side, worker in workers.items()}
        check_losses(losses)
        memory = {side: worker.ask("memory", count=2) for side, worker in workers.items()}
        seconds: dict[str, list[list[float]]] = {side: [] for side in SIDES}
        for turn in range(arguments.rounds):
            order = SIDES[turn % len(SIDES) :] + SIDES[: turn % len(SIDES)]
            for side in order:
                seconds[side].append(workers[side].ask("steps", count=arguments.steps))
        parts = {side: workers[side].ask("parts", count=arguments.steps) for side in SIDES}
    return {
        "model": work["model"],
        "rows": ROWS,
        "sequence": SEQUENCE,
        "losses": losses,
        "seconds": seconds,
        "parts": parts,
        "memory": memory,
        "versions": versions,
        **summary(seconds),
    }


def summary(seconds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Each side's fastest step, what it gives in tokens/s, and geojax against the faster PyTorch.

    Whatever else runs on the machine can only slow a step down, so the fastest one says most about
    the program; medians are recorded beside it.
    """
    steps = {side: [step for turn in turns for step in turn] for side, turns in seconds.items()}
    fastest = {side: min(values) for side, values in steps.items()}
    median = {side: statistics.median(values) for side, values in steps.items()}
    best = min(SIDES[1:], key=fastest.__getitem__)
    return {
        "fastest_step_seconds": fastest,
        "median_step_seconds": median,
        "tokens_per_second": {side: ROWS * SEQUENCE / value for side, value in fastest.items()},
        "best_torch": best,
        "ratio": fastest[best] / fastest["geojax"],
        "ratio_of_medians": min(median[side] for side in SIDES[1:]) / median["geojax"],
    }


def show(console: Console, name: str, threads: int, result: dict[str, Any]) -> None:
    table = Table(title=f"{name} T={SEQUENCE} batch {ROWS}, fp32, {threads} threads")
    table.add_column("", justify="left")
    for side in SIDES:
        table.add_column(side, justify="right")

    def row(title: str, values: dict[str, float], form: str, scale: float = 1.0) -> None:
        table.add_row(title, *(format(values[side] * scale, form) for side in SIDES))

    row("tokens/s", result["tokens_per_second"], ",.0f")
    row("median step, ms", result["median_step_seconds"], ".1f", 1e3)
    row("fastest step, ms", result["fastest_step_seconds"], ".1f", 1e3)
    parts = result["parts"]
    for part in PARTS:
        row(f"  {part}, ms", {side: parts[side][part] for side in SIDES}, ".1f", 1e3)
    rest = {
        side: result["fastest_step_seconds"][side] - sum(parts[side][part] for part in PARTS)
        for side in SIDES
    }
    row("  rest (norms, SwiGLU, RoPE, embedding ...), ms", rest, ".1f", 1e3)
    row("peak memory, MB", {s: m["peak"] for s, m in result["memory"].items()}, ",.0f", 1e-6)
    row("loss after 3 steps", {s: x[-1] for s, x in result["losses"].items()}, ".6f")
    console.print(table)
    verdict = "meets" if result["ratio"] >= GOAL else "misses"
    console.print(
        f"geojax runs at {result['ratio']:.2f} of {result['best_torch']}'s speed "
        f"({verdict} the goal of {GOAL}; {result['ratio_of_medians']:.2f} by medians)\n"
    )


def main() -> None:
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("this benchmark compares with PyTorch: pip install torch==2.13.0")
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=cores, help="threads and cores of each side")
    parser.add_argument("--rounds", type=int, default=9, help="turns that each side gets")
    parser.add_argument("--steps", type=int, default=5, help="steps of one turn")
    parser.add_argument("--remat", default="none", help="geojax's rematerialization policy")
    parser.add_argument("--only", choices=CONFIGURATIONS, help="just this configuration")
    parser.add_argument("--output", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    if not 1 <= arguments.threads <= cores:
        raise SystemExit(
            f"--threads must be from 1 to {cores}, the cores that this process may use"
        )

    console = Console(width=110)
    results = {}
    for name, configuration in CONFIGURATIONS.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                results[name] = measure(configuration, arguments, Path(folder))
            show(console, name, arguments.threads, results[name])
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": {"processor": processor(), "cores": cores, "threads": arguments.threads},
            "python": platform.python_version(),
            "geojax": importlib.metadata.version("geojax") if _installed("geojax") else "source",
            "results": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


def _installed(package: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(package)
        return True
    return False


if __name__ == "__main__":
    main()
