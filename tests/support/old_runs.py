"""Runs of every family that an earlier geojax saved: what later ones must resume to the bit.

    python tests/support/old_runs.py FOLDER [NAME ...]

trains each for two steps and packs what it saved, and writes down a digest of its state; then it
goes on for two more, and writes down their losses. `tests/data/old_runs` was made in this way,
once: never make it anew to pass a test.
"""

import argparse
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[each]) for each in (2, 1)]

SAVED_STEPS, STEPS = 2, 4
SGD = {"name": "sgd", "beta1": 0.0}
QWEN3 = {"use_qk_norm": True, "head_dim": 8}
RUNS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"preset": "deepseek-v3-671b"},
    "deepseekmoe": {"preset": "deepseekmoe-16b", "optimizer": SGD},
    "gemma2": {"preset": "gemma2-9b", "optimizer": SGD},
    "gemma3": {"preset": "gemma3-1b", "optimizer": SGD},
    "gpt-oss": {"preset": "gpt-oss-20b", "optimizer": SGD},
    "gpt2": {"preset": "gpt3-175b", "model": {"mlp_bias": True}, "optimizer": SGD},
    "llama": {"preset": "llama3-8b"},
    "mistral": {"preset": "mistral-7b-v0.1", "optimizer": SGD},
    "mixtral": {"preset": "mixtral-8x7b", "optimizer": SGD},
    "nemotron": {"preset": "nemotron4-15b", "optimizer": SGD},
    "qwen2": {"preset": "llama3-8b", "model": {"qkv_bias": True}, "optimizer": SGD},
    "qwen3": {"preset": "llama3-8b", "model": QWEN3, "optimizer": SGD},
    "qwen3-moe": {"preset": "mixtral-8x7b", "model": QWEN3, "optimizer": SGD},
    "lora": {"preset": "llama3-8b", "model": {"lora": {"rank": 2, "alpha": 4.0}}},
    "fp8": {"preset": "llama3-8b", "precision": "fp8-delayed", "optimizer": SGD},
}
"""Presets that are shrunk, and what is changed of them and of the run, by the run's name."""

CORPUS, WEIGHTS, EXPECTED = "corpus", "weights", "expected.json"
"""Also there: the prepared text, the weights that adapters adapt; digests and losses."""


def config_of(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Return the config of a run in `folder`, where the corpus is, too."""
    from support.shrunk_presets import shrunk

    run = RUNS[name]
    model = shrunk(run["preset"]).model_dump(exclude_unset=True, mode="json")
    config = {
        "run_directory": str(folder / name),
        "steps": steps,
        "mesh": {"data": 8},
        "simulate_devices": 8,
        "model": model | run.get("model", {}),
        "data": {"sources": [{"name": "sums", "prepared": str(folder / CORPUS / "sums")}]},
        "batch": {"global_batch_size": 8, "sequence_length": 32},
        "precision": run.get("precision", "fp32"),
        "optimizer": {"warmup_steps": 1, "decay_steps": STEPS} | run.get("optimizer", {}),
    }
    return config | ({"initial_weights": str(folder / WEIGHTS)} if name == "lora" else {})


def losses(run: Path) -> Iterator[float]:
    """Read the losses of a run's steps, in their order."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        if (loss := json.loads(line).get("loss")) is not None:
            yield loss


def pack(folder: Path, name: str, into: Path) -> None:
    with tarfile.open(into / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(folder / name, name)


def unpack(name: str, folder: Path, packed: Path) -> None:
    with tarfile.open(packed / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")


def make(folder: Path, name: str, into: Path) -> dict[str, Any]:
    """Train a run and pack what it saved; return its digest, and the losses after that."""
    from support.shrunk_presets import digest

    import geojax

    with geojax.Trainer(config_of(name, folder, SAVED_STEPS)) as trainer:
        trainer.fit()
        saved = digest(trainer.state)
    run = folder / name
    for written in ("loss.png", "step.yaml", "lock"):
        (run / written).unlink(missing_ok=True)
    shutil.rmtree(run / "tensorboard", ignore_errors=True)
    pack(folder, name, into)
    with geojax.Trainer(config_of(name, folder, STEPS)) as trainer:
        trainer.fit()
    return {"state": saved, "losses": list(losses(run))[SAVED_STEPS:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the packed runs are put")
    parser.add_argument("names", nargs="*", default=list(RUNS), help="runs; default: all")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    from geojax.runtime import simulate_devices

    simulate_devices(8)
    from support.small_runs import prepare_corpus

    from geojax.saved_runs.export import export_run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CORPUS).mkdir()
        prepare_corpus(folder / CORPUS)
        (folder / CORPUS / "text.jsonl").unlink()
        pack(folder, CORPUS, arguments.folder)
        made = {}
        for run in arguments.names:
            if run == "lora":
                export_run(folder / "llama", folder / WEIGHTS)
                pack(folder, WEIGHTS, arguments.folder)
            made[run] = make(folder, run, arguments.folder)
            print(run, made[run], flush=True)
        (arguments.folder / EXPECTED).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
