"""Steps of a run whose batch grows: those of one device at every size, on the same state."""

import concurrent.futures
import functools

import jax
import numpy as np
import pytest
from support import whole_state
from support.resolving import compiled_run, island_run
from support.small_models import make_batch

from geojax import make_mesh
from geojax.config.run_config import RunConfig
from geojax.islands.island_plan import make_site_mesh, sequences_of_site
from geojax.transport import loopback

FULL, SITES, LENGTH = 16, 2, 16
REQUESTS = {"stop": False, "save": False}
CONFIG = {
    "run_directory": "unused",
    "steps": 10,
    "model": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 20,
        "vocab_size": 61,
        "max_position_embeddings": LENGTH,
        "dropout": 0.1,
    },
    "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
    "batch": {
        "global_batch_size": FULL,
        "sequence_length": LENGTH,
        "microbatches": 4,
        "ramp": {"start": 4, "increment": 4, "sequences": 30},
    },
    "precision": "fp64",
    "optimizer": {"warmup_steps": 1},
}
SIZES = (4, 16)
"""Those of the first two steps: an increment may be skipped."""


@pytest.fixture(scope="module", autouse=True)
def doubles():
    """In all threads, those of the stages too."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def config_of(**changes):
    return RunConfig.model_validate(CONFIG | changes)


@functools.cache
def batches():
    model = config_of().model
    return [
        make_batch(model, seed, size, sequence=LENGTH) for seed, size in enumerate((*SIZES, FULL))
    ]


def in_one_program(config):
    """Losses of a step of each size and of a validation, and the weights."""
    mesh = make_mesh(devices=jax.devices()[: config.mesh.devices], **config.mesh.model_dump())
    run = compiled_run(config, mesh, validate=True)
    state, losses = run.initial_state(), []
    for size, batch in zip(SIZES, batches(), strict=False):
        if size != run.sequences:
            run = run.of_batch(size)
        state, metrics = run.step(state, batch, REQUESTS)
        losses.append(float(metrics["loss"]))
    sums = np.asarray(run.evaluate(state, batches()[-1]))
    return losses, sums, whole_state.on_host(state.parameters, run.layouts.parameters)


@functools.cache
def on_one_device():
    return in_one_program(config_of())


def assert_same(losses, sums):
    expected, expected_sums, _ = on_one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": {"dc": 2, "data": 2}, "zero": {"stage": 3}},
        {
            "mesh": {"dc": 2},
            "dc": {"role": "stage"},
            "pipeline": {"schedule": "1f1b", "hop_ticks": 2, "layers": [1, 1]},
        },
    ],
    ids=["data", "stage"],
)
def test_one_program_steps_as_one_device_at_each_size(changes):
    losses, sums, weights = in_one_program(config_of(**changes))
    assert_same(losses, sums)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12),
        weights,
        on_one_device()[2],
    )


@pytest.mark.parametrize("role", ["data", "stage"])
def test_islands_step_as_one_device_at_each_size(role):
    config = config_of(mesh={"dc": SITES}, dc={"role": role, "join": "islands"})

    def of_site(transport):
        mesh = make_site_mesh(config, [jax.devices()[transport.site]])
        run = island_run(config, mesh, transport, sequences=SIZES[0])
        state, losses = run.initial_state(), []
        for size, batch in zip(SIZES, batches(), strict=False):
            if size != run.sequences:
                run = run.of_batch(size)
            share = size // SITES if role == "data" else size
            first = transport.site * share if role == "data" else 0
            own = {name: leaf[first : first + share] for name, leaf in batch.items()}
            state, metrics = run.step(state, own, REQUESTS)
            losses.append(float(metrics["loss"]))
        rows = sequences_of_site(config, run.plan, transport.site)
        sums = run.evaluate(state, {name: leaf[rows] for name, leaf in batches()[-1].items()})
        return losses, sums

    with concurrent.futures.ThreadPoolExecutor(SITES) as threads:
        for losses, sums in threads.map(of_site, loopback(SITES)):
            assert_same(losses, sums)
