"""The step time of two islands over an emulated link, beside that of another checkout.

    python benchmarks/island_steps.py --beside /path/to/checkout     # as root

Both checkouts train the same small model in alternation, over 21 ms and 1 Gbit/s, one process a
site. Prints the median step of each run, without the first steps, and writes JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from worker import processor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RESULT = Path(__file__).parent / "results" / "island_steps.json"
NAME = "islandsteps"
STEPS, WARM_STEPS = 120, 20
MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 301,
    "max_position_embeddings": 128,
}


def train(checkout: Path, folder: Path, corpus: Path) -> float:
    """Return the median seconds of a step of a checkout's run in a folder of its own."""
    from support.small_runs import write_config

    folder.mkdir()
    config = write_config(
        folder / "run.yaml",
        corpus,
        steps=STEPS,
        simulate_devices=1,
        mesh={"dc": 2},
        dc={"join": "islands"},
        model=MODEL,
        evaluation={},
        checkpoint={},
    )
    command = [sys.executable, "-m", "geojax", "launch", "--wan", "--wan-name", NAME, "--islands"]
    variables = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--", "train", str(config)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{checkout}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    metrics = next(folder.rglob("metrics.jsonl"))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    return statistics.median(seconds[WARM_STEPS:])


def main() -> None:
    """Train in alternation, print and write the medians."""
    from support.small_runs import prepare_corpus

    from geojax.wan import WanSettings, bring_up, take_down

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--alternations", type=int, default=6)
    parser.add_argument("--output", type=Path, default=RESULT)
    chosen = parser.parse_args()
    checkouts = {"this": ROOT, "other": chosen.beside.resolve()}
    seconds: dict[str, list[float]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        corpus = prepare_corpus(folder / "corpus")
        bring_up(WanSettings(round_trip_seconds=0.021, bytes_per_second=125e6), NAME)
        try:
            for turn in range(chosen.alternations):
                for side in sorted(checkouts, reverse=bool(turn % 2)):
                    step = train(checkouts[side], folder / f"{side}-{turn}", corpus)
                    seconds[side].append(step)
                    print(f"{turn}: {side} {1e3 * step:.0f} ms a step", flush=True)
        finally:
            take_down(NAME)
    medians = {side: statistics.median(steps) for side, steps in seconds.items()}
    result: dict[str, Any] = {
        "processor": processor(),
        "steps": STEPS,
        "seconds": seconds,
        "median_seconds": medians,
        "ratio": medians["this"] / medians["other"],
    }
    chosen.output.write_text(json.dumps(result, indent=1) + "\n")
    for side, step in medians.items():
        print(f"{side:6} {1e3 * step:.1f} ms a step")
    print(f"ratio  {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
