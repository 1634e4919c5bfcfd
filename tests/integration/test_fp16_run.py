"""A run in fp16: its loss scale finds its level, and is resumed as it stood in the checkpoint."""

import itertools
import json

from support.small_runs import remove_checkpoint, train, write_config

SETTINGS = {
    "steps": 15,
    "simulate_devices": 4,
    "mesh": {"dc": 2, "data": 2},
    "precision": "fp16",
    # Too large at first; and saved in the middle of a count of clean steps.
    "loss_scale": {"initial": 2**26, "grow_after_steps": 3},
    "skip_limit": 2,
    "checkpoint": {"interval": 10},
}


def metrics(run):
    names = ("step", "loss", "gradient_norm", "loss_scale", "skipped", "learning_rate")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in names] for line in lines if "loss" in line]


def test_a_run_in_fp16_is_resumed_with_the_same_bits(tmp_path, corpus):
    config = write_config(tmp_path / "run.yaml", corpus, **SETTINGS)
    result = train(config)
    assert result.returncode == 0, result.stdout + result.stderr
    whole = metrics(tmp_path / "run")
    scales = [line[3] for line in whole]
    first = next(number for number, line in enumerate(whole) if line[4] == number)
    assert "not finite at a loss scale of 2^26; the step is skipped" in result.stdout
    assert first > SETTINGS["skip_limit"], "a scale that can still shrink does not end a run"
    assert scales[: first + 1] == [2.0 ** (26 - step) for step in range(first + 1)]
    assert any(after > before for before, after in itertools.pairwise(scales)), "it grows again"

    remove_checkpoint(tmp_path / "run", 15)
    again = train(config, "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming from step 10" in again.stdout
    assert metrics(tmp_path / "run") == whole
