"""Weights of a Hugging Face checkpoint, trained on by two sites in FP8, and exported again."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.island_jobs import SETTINGS, SITES, start_sites
from support.small_runs import finish, losses, start_processes, write_config

from geojax.cli.main import run as geojax
from geojax.models import ModelConfig, init_parameters
from geojax.models.huggingface.write import CheckpointWriter
from geojax.named_arrays import leaves_by_name

RATE, STEPS = 1e-3, 2
MODEL = ModelConfig(
    num_hidden_layers=2,
    hidden_size=36,
    num_attention_heads=2,
    head_dim=16,
    intermediate_size=52,
    vocab_size=301,
    max_position_embeddings=32,
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The folder of a checkpoint with random weights."""
    folder = tmp_path_factory.mktemp("weights")
    leaves = leaves_by_name(init_parameters(MODEL, jax.random.key(5)))
    with CheckpointWriter(folder, MODEL, dtype="float32", token_ids={}) as writer:
        for name in writer.leaves:
            values = np.asarray(leaves[name])
            writer.put(name, tuple(map(np.arange, values.shape)), values)
    return folder


@pytest.mark.parametrize("join", ["one_program", "islands"])
def test_weights_come_in_are_trained_in_fp8_and_go_out(join, weights, corpus, tmp_path):
    changes = {
        "steps": STEPS,
        "dc": {"join": join},
        "model": {"huggingface": str(weights)},
        "initial_weights": str(weights),
        "precision": "fp8-delayed",
        "optimizer": {
            "peak_learning_rate": RATE,
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "schedule": "constant",
        },
        "evaluation": {},
        "checkpoint": {},
    }
    config = write_config(tmp_path / "run.yaml", corpus, **SETTINGS | changes)
    islands = join == "islands"
    sites = start_sites(config) if islands else start_processes(config, sites=SITES)
    for process, printed in zip(sites, finish(*sites), strict=True):
        assert process.returncode == 0, printed
    run, output = tmp_path / "run", tmp_path / "out"
    metrics = run / SITES[0] if islands else run
    assert losses(metrics)[STEPS] < losses(metrics)[1]
    assert geojax(["export", str(run), "--output", str(output), "--dtype", "float32"]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (weights, output))
    assert {name: leaf.shape for name, leaf in after.items()} == {
        name: leaf.shape for name, leaf in before.items()
    }
    for name, leaf in after.items():
        moved = np.abs(leaf - before[name]).max()
        # An update of Adam moves no weight by much more than the learning rate.
        assert 0 < moved <= 1.5 * STEPS * RATE, name
