"""A run in FP8: says who multiplies, and resumes with its histories of magnitudes."""

import json
import shutil

from support.small_runs import train, write_config

SETTINGS = {
    "steps": 12,
    "simulate_devices": 4,
    "mesh": {"dc": 2, "data": 2},
    "precision": "fp8-delayed",
    "checkpoint": {"every_steps": 8},
    "evaluation": {"every_steps": 6, "rows": 24},
}


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "gradient_norm")
    return [[line[name] for name in names] for line in lines if "loss" in line]


def test_a_run_with_delayed_scaling_is_resumed_with_the_same_bits(tmp_path, corpus):
    config = write_config(tmp_path / "run.yaml", corpus, **SETTINGS)
    result = train(config)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FP8 recipe delayed: reference, since XLA multiplies FP8 numbers on" in result.stdout
    whole = metrics(tmp_path / "run")
    assert whole[-1][1] < whole[0][1] - 0.1, "it learns"

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    again = train(config, "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming from step 8" in again.stdout
    assert metrics(tmp_path / "run") == whole
