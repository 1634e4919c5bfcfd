"""Runs of `geojax train` in processes of their own, on a small model and a small corpus."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import yaml
from support.distances import assert_no_further_than, distances
from support.ports import free_port
from support.xla_flags import COMPILE_FAST, MAX_ISA

from geojax.data import PrepareSettings, prepare

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 240

Losses: TypeAlias = dict[int, float]
"""Losses by step."""


def prepare_corpus(folder: Path) -> Path:
    """A prepared corpus of a few hundred short documents; returns its folder."""
    lines = [
        json.dumps({"text": " ".join(f"{word} is {number * word % 17}" for word in range(30))})
        for number in range(300)
    ]
    text = folder / "text.jsonl"
    text.write_text("\n".join(lines))
    settings = PrepareSettings(
        output=folder,
        sources=({"name": "sums", "files": (str(text),), "validation_fraction": 0.1},),
        vocab_size=300,
    )
    return prepare(settings)[0].folder


def write_config(path: Path, corpus: Path, **changes) -> Path:
    """A config of a run of 20 steps on two sites of four devices, changed by `changes`."""
    config = {
        "run_directory": str(path.parent / "run"),
        "steps": 20,
        "simulate_devices": 8,
        "mesh": {"dc": 2, "data": 4},
        "model": {
            "num_hidden_layers": 2,
            "hidden_size": 36,  # divides over neither 8 nor 24 ranks: the state is padded
            "num_attention_heads": 2,
            "head_dim": 16,
            "intermediate_size": 52,
            "vocab_size": 301,
            "max_position_embeddings": 32,
            "dropout": 0.1,
        },
        "data": {"sources": [{"name": "sums", "prepared": str(corpus)}]},
        "batch": {"global_batch_size": 24, "sequence_length": 32},
        "precision": "fp32",
        "optimizer": {"peak_learning_rate": 3e-3, "warmup_steps": 5},
        "communication": {"bucket_bytes": 16384},
        "evaluation": {"interval": 10, "sequences": 24},
        "checkpoint": {"interval": 10},
    }
    path.write_text(yaml.safe_dump(config | changes))
    return path


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "geojax", "train", str(config), *arguments]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a run: this one's without what would configure it, and `variables`."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GEOJAX_", "SLURM_", "XLA_", "JAX_"))
    }
    path = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
    return clean | {"PYTHONPATH": path, "XLA_FLAGS": f"{COMPILE_FAST} {MAX_ISA}"} | variables


def train(config: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run `geojax train` to its end."""
    return subprocess.run(
        command(config, *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def start(target: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    """Start `geojax train` on a config, or a Python program; its pipe brings stdout and stderr."""
    line = [sys.executable, str(target), *arguments]
    return subprocess.Popen(
        line if target.suffix == ".py" else command(target, *arguments),
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_processes(
    target: Path, *arguments: str, sites: tuple[str, ...], **variables: str
) -> list[subprocess.Popen]:
    """Start one process of a run for each of `sites`."""
    common = {
        "GEOJAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "GEOJAX_PROCESS_COUNT": str(len(sites)),
    } | variables
    return [
        start(target, *arguments, GEOJAX_PROCESS_ID=str(process), GEOJAX_SITE=site, **common)
        for process, site in enumerate(sites)
    ]


def finish(*processes: subprocess.Popen) -> list[str]:
    """What each process printed, after all have ended; none outlives the test."""
    try:
        return [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def checkpoint_folders(run: Path) -> list[Path]:
    """The folders of committed checkpoints, of all sites: `checkpoints/20` or `.../east/20`."""
    folders = [*run.glob("checkpoints/*"), *run.glob("checkpoints/*/*")]
    return sorted(folder for folder in folders if folder.name.isdecimal())


def saved_steps(run: Path) -> list[int]:
    """The steps of the committed checkpoints."""
    return sorted({int(folder.name) for folder in checkpoint_folders(run)})


def remove_checkpoint(run: Path, step: int) -> None:
    """Remove what all sites have saved of a step."""
    for folder in checkpoint_folders(run):
        if folder.name == str(step):
            shutil.rmtree(folder)


def losses(run: Path) -> Losses:
    """Training loss by step, as the run wrote it."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def train_in_float64(folder: Path, corpus: Path, **changes) -> Path:
    """Train a config of `write_config` on one device in float64; return its run directory."""
    of_layout = ("mesh", "dc", "pipeline")
    same = {name: value for name, value in changes.items() if name not in of_layout}
    alone = {"precision": "fp64", "simulate_devices": 1, "mesh": {}}
    result = train(write_config(folder / "run.yaml", corpus, **same | alone))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "run"


def assert_as_near(actual: Losses, one_device: Losses, exact: Losses) -> None:
    """Hold losses in fp32 to float64 (see `support.distances`), step by step.

    Args:
        actual: the losses of a run, by step.
        one_device: those of one device in fp32, or of another layout, of the same steps and more.
        exact: those of float64, of the same steps and more.
    """
    histories = (
        {"losses": np.array([each[step] for step in actual])} for each in (one_device, actual)
    )
    wanted = {"losses": np.array([exact[step] for step in actual])}
    assert_no_further_than(*(distances(history, wanted) for history in histories))


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Until `step` stands in the metrics of `run`; fails when the process ends before."""

    def written() -> bool:
        try:
            return max(losses(run), default=0) >= step
        except (FileNotFoundError, json.JSONDecodeError):
            return False

    wait_for(written, process)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Until `condition` holds; fails when the process ends before."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"nothing within {TIMEOUT} s"
        time.sleep(0.02)
