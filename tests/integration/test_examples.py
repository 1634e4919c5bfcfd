"""The examples of the documentation run as they stand, and compute what they say."""

import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from support.equality import assert_equal_gradients

from geojax.models.chunk.layer_io import layer_slice

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_model_trains_across_two_sites():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "own_model.py"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert len(losses) >= 2, run.stdout
    assert losses[-1] < 0.5 * losses[0], f"the loss did not fall: {losses}"
    crossing = [line.split() for line in run.stdout.splitlines() if line.startswith("dc ")]
    assert [words[1] for words in crossing] == ["all-reduce"], run.stdout


def test_own_model_trains_as_a_pipeline_through_two_sites():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "own_model_pipeline.py"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert len(losses) >= 2, run.stdout
    assert losses[-1] < 0.5 * losses[0], f"the loss did not fall: {losses}"
    loops = [line.split()[1] for line in run.stdout.splitlines() if "4 of 4" in line]
    assert loops == ["collective-permute"] * 2, run.stdout


def test_own_model_in_a_pipeline_has_the_gradients_of_one_device(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("own_model_pipeline")
    pipeline = dataclasses.replace(example.pipeline, sum_dtype=np.float64)
    with jax.enable_x64(True):
        weights = example.initial_weights(jax.random.key(0))
        weights = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), weights)
        batch = example.make_batch(0)

        @jax.jit
        def on_one_device(weights, batch):
            batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
            embed, layers, head = weights
            x = pipeline.embed(embed, batch)
            for number in range(example.LAYERS):
                x = pipeline.layer(layer_slice(layers, number), x)
            return pipeline.head(head, x, batch)

        on_mesh = jax.shard_map(
            pipeline.loss_and_gradients,
            mesh=example.mesh,
            in_specs=(pipeline.weights_spec, example.batch_spec),
            out_specs=(jax.P(), pipeline.weights_spec),
        )
        loss, expected = jax.value_and_grad(on_one_device)(weights, jax.device_get(batch))
        actual_loss, actual = jax.jit(on_mesh)(pipeline.shard(*weights), batch)
        np.testing.assert_allclose(actual_loss, loss, rtol=1e-10)
        assert_equal_gradients(pipeline.unshard(actual), expected, 1e-10)
