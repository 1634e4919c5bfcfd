"""A run from Python: fitted, stepped, evaluated and saved, with the bits of the command."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from support.small_runs import prepare_corpus

import geojax
from geojax.errors import UserError

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The settings of a small run on two simulated sites."""
    corpus = prepare_corpus(tmp_path_factory.mktemp("corpus"))
    return {
        "run_directory": "replaced",
        "steps": 4,
        "mesh": {"dc": 2, "data": 2},
        "simulate_devices": 8,
        "model": {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
        },
        "data": {"sources": [{"name": "sums", "prepared": str(corpus)}]},
        "batch": {"global_batch_size": 8, "sequence_length": 32},
        "precision": "fp32",
        "evaluation": {"interval": 2, "sequences": 8},
    }


def test_a_fit_is_the_run_of_the_command(config, tmp_path, capfd):
    settings = {"mesh.dc": 4, "run_directory": str(tmp_path / "python")}
    with geojax.Trainer(config, settings) as trainer:
        summary = trainer.fit()
        losses = trainer.evaluate()
    assert capfd.readouterr() == ("", "")
    assert (summary.step, summary.stopped_early, summary.compilations) == (4, False, 1)
    ((name, points),) = summary.validation.items()
    assert [step for step, _ in points] == [0, 2, 4]
    assert losses[name] == points[-1][1]
    assert (tmp_path / "python" / "step.yaml").is_file()

    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    given = ["--mesh.dc", "4", "--run_directory", str(tmp_path / "command")]
    command = [sys.executable, "-m", "geojax", "train", str(path), *given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    of_both = [
        [json.loads(line).get("loss") for line in (tmp_path / each / "metrics.jsonl").open()]
        for each in ("python", "command")
    ]
    assert of_both[0] == of_both[1]


def test_a_run_goes_on_by_steps_of_the_callers_batches(config, tmp_path):
    directory = {"mesh.dc": 4, "run_directory": str(tmp_path / "run")}
    with geojax.Trainer(config, directory | {"steps": 2}) as trainer:
        trainer.fit()
    said = []
    with geojax.Trainer(config, directory, log=said.append) as trainer:
        assert any(line.startswith("resuming from step 2") for line in said)
        assert any("resolved anew, for other steps; the earlier" in line for line in said)
        before = jax.device_get(trainer.state.parameters)
        batch = next(iter(trainer.loader.iterate(16)))
        metrics = trainer.step(batch)
        assert metrics["loss"] > 0
        assert trainer.step_number == int(trainer.state.step) == 3
        trainer.save()
    after = jax.device_get(trainer.state.parameters)
    assert not np.array_equal(*(jax.tree.leaves(each)[0] for each in (before, after)))
    with geojax.Trainer(config, directory) as trainer:
        assert trainer.step_number == 3
        jax.tree.map(np.testing.assert_array_equal, trainer.state.parameters, after)


def test_a_growing_batch_goes_on_in_the_middle_of_its_ramp_on_another_mesh(config, tmp_path):
    # Batches of 8, 8, 16 and 16 sequences.
    ramp = {"start": 8, "increment": 8, "sequences": 16}
    batch = config["batch"] | {"global_batch_size": 16, "microbatches": 2, "ramp": ramp}
    settings = {"batch": batch, "mesh.data": 4}
    whole, part = ({"run_directory": str(tmp_path / name)} for name in ("whole", "part"))
    with geojax.Trainer(config, settings | whole) as trainer:
        summary = trainer.fit()
        assert (summary.compilations, trainer.consumed_sequences) == (2, 48)
    first = {"steps": 1, "optimizer.decay_steps": 4, "mesh.dc": 4, "mesh.data": 2}
    with geojax.Trainer(config, settings | part | first) as trainer:
        trainer.fit()
    said = []
    with geojax.Trainer(config, settings | part, log=said.append) as trainer:
        assert (trainer.step_number, trainer.consumed_sequences) == (1, 8)
        batches = trainer.loader.iterate(8)
        trainer.step(next(batches))  # still of 8 sequences
        metrics = trainer.step(next(batches))  # of 16, which compiles their step
        batches.close()
        assert (trainer.runtime.sequences, trainer.consumed_sequences) == (16, 32)
        assert trainer.fit().step == 4
    assert sum("batch has 8 sequences, and grows by 8 to 16" in line for line in said) == 1
    assert sum("step 2: the next batch has 16 of 16 sequences" in line for line in said) == 1
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").open()]
    steps = [line for line in lines if "loss" in line]
    assert [line["global_batch_size"] for line in steps] == [8, 8, 16, 16]
    assert [line["consumed_sequences"] for line in steps] == [8, 16, 32, 48]
    assert metrics["loss"] == pytest.approx(steps[2]["loss"], rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "part" / "metrics.jsonl").open()]
    assert lines[-2]["loss"] == pytest.approx(steps[3]["loss"], rel=1e-5)


def test_a_mistake_is_an_error_and_nothing_is_left_open(config, tmp_path):
    settings = {"run_directory": str(tmp_path / "run"), "mesh.dc": 4}
    with pytest.raises(UserError, match="global_batch_size=9 does not divide"):
        geojax.Trainer(config, settings | {"batch.global_batch_size": 9})
    with pytest.raises(UserError, match="nothing"):
        geojax.Trainer(config, settings | {"data.sources": [{"name": "a", "prepared": "nothing"}]})
    with geojax.Trainer(config, settings) as trainer:
        trainer.fit()
    with geojax.Trainer(config, settings) as trainer:  # the lock is free again
        assert trainer.step_number == 4
