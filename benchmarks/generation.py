"""Greedy generation in geojax and in transformers on the same CPU: tokens a second, side by side.

    python benchmarks/generation.py --threads 1 --output benchmarks/results/generation.json

Each side runs in a process of its own, pinned to the same cores with the same number of threads,
and reads the same random Llama in fp32 from the same files. The processes live side by side and
take turns, so that a machine that slows down slows both. Before any timing both continue the
prompts and must write the same tokens. The time is that of a whole call: prompts read, tokens
written.

Needs the extra `oracles`.
"""

import argparse
import contextlib
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

from rich.console import Console
from rich.table import Table
from worker import BENCHMARKS, Worker, processor

SIDES_FOLDER = BENCHMARKS / "generation_sides"
SIDES = ("geojax", "transformers")
GOAL = 0.5
"""Least tokens a second of geojax for each of transformers."""

MODEL = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
PROMPT, NEW = 64, 64
BATCHES = (1, 8)


@contextlib.contextmanager
def running_workers(folder: Path, threads: int) -> Iterator[dict[str, Worker]]:
    workers: dict[str, Worker] = {}
    try:
        for side in reversed(SIDES):  # transformers writes the model that geojax reads
            workers[side] = Worker(
                side, SIDES_FOLDER / f"{side}_side.py", json.dumps([str(folder), threads])
            )
            workers[side].ask("versions")
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def measure(workers: dict[str, Worker], batch: int, rounds: int) -> dict[str, Any]:
    """Time both sides in turns; tokens a second are those of the fastest call."""
    work = {"batch": batch, "prompt": PROMPT, "new": NEW}
    written = {side: workers[side].ask("write", **work) for side in SIDES}
    if written["geojax"] != written["transformers"]:
        raise SystemExit(f"batch {batch}: the sides write different tokens")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(rounds):
        for side in SIDES if turn % 2 else reversed(SIDES):
            seconds[side] += workers[side].ask("seconds", **work)
    rates = {side: batch * NEW / min(values) for side, values in seconds.items()}
    medians = {side: batch * NEW / statistics.median(values) for side, values in seconds.items()}
    return {
        "batch": batch,
        "prompt": PROMPT,
        "new_tokens": NEW,
        "seconds": seconds,
        "tokens_per_second": rates,
        "median_tokens_per_second": medians,
        "ratio": rates["geojax"] / rates["transformers"],
        "ratio_of_medians": medians["geojax"] / medians["transformers"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.json").write_text(json.dumps(MODEL))
        with running_workers(Path(folder), arguments.threads) as workers:
            versions: dict[str, str] = {}
            for worker in workers.values():
                versions |= worker.ask("versions")
            results = [measure(workers, batch, arguments.rounds) for batch in BATCHES]
    table = Table(title=f"Greedy generation, fp32, {arguments.threads} threads: tokens a second")
    for name in ("batch", *SIDES, "ratio", "ratio of medians"):
        table.add_column(name, justify="right")
    for result in results:
        rates = [f"{result['tokens_per_second'][side]:.0f}" for side in SIDES]
        ratios = [f"{result[name]:.2f}" for name in ("ratio", "ratio_of_medians")]
        table.add_row(str(result["batch"]), *rates, *ratios)
    console.print(table)
    if arguments.output is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": {
                "processor": processor(),
                "cores": os.cpu_count(),
                "threads": arguments.threads,
            },
            "python": platform.python_version(),
            "versions": versions,
            "model": MODEL,
            "goal": GOAL,
            "results": results,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(result["ratio"] >= GOAL for result in results) else 3


if __name__ == "__main__":
    sys.exit(main())
