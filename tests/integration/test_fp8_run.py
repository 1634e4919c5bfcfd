"""Runs in FP8, through the benchmark of precisions: beside bf16, and resumed with their history."""

import json
import subprocess
import sys

from support.small_runs import REPOSITORY, TIMEOUT, environment, remove_checkpoint, write_config

from geojax.train.metrics import read_metrics

SETTINGS = {
    "simulate_devices": 4,
    "mesh": {"dc": 2, "data": 2},
    "optimizer": {"peak_learning_rate": 1e-3, "warmup_steps": 5},
    "evaluation": {"sequences": 24},
}
STEPS, STOPPED_AT = 30, 25
TRAINED = ("bf16", "fp8-delayed", "fp8-block")


def compare_precisions(config, runs, output):
    """Run the benchmark to its end; what it prints, and what it writes."""
    script = REPOSITORY / "benchmarks" / "precision.py"
    arguments = ["--steps", str(STEPS), "--runs", runs, "--output", output, "--only", *TRAINED]
    result = subprocess.run(
        [sys.executable, script, "--config", config, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads(output.read_text())["results"]


def losses(result):
    return {name: result[name] for name in ("training", "validation", "skipped")}


def test_fp8_runs_stay_beside_bf16_and_are_resumed_with_the_same_bits(tmp_path, corpus):
    config = write_config(tmp_path / "run.yaml", corpus, **SETTINGS)
    runs, output = tmp_path / "runs", tmp_path / "precision.json"
    printed, whole = compare_precisions(config, runs, output)
    assert "FP8 recipe delayed: reference, as asked" in printed
    assert "goal 1%: reached" in printed
    assert set(whole) == set(TRAINED)
    for result in whole.values():
        assert len(result["training"]) == STEPS
        assert result["final_validation_loss"] < result["validation"][0][1] - 0.5, "it learns"
        assert abs(result["ratio"] - 1) < 0.01
    assert len({result["final_validation_loss"] for result in whole.values()}) == len(TRAINED)
    assert output.with_suffix(".png").stat().st_size > 10_000

    # The state of a history lies in the checkpoint; what is finished is not trained again.
    stopped = runs / "fp8-delayed"
    remove_checkpoint(stopped, STEPS)
    kept = [line for line in read_metrics(stopped / "metrics.jsonl") if line["step"] <= STOPPED_AT]
    (stopped / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    printed, again = compare_precisions(config, runs, output)
    assert printed.count("is finished, in") == len(TRAINED) - 1
    assert f"resuming from step {STEPS * 2 // 3} in {stopped}" in printed
    assert {name: losses(result) for name, result in again.items()} == {
        name: losses(result) for name, result in whole.items()
    }
