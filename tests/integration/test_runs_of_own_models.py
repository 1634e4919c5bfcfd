"""The examples of models of your own: over two sites they train as their modules do alone."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support import whole_state
from support.island_jobs import start_sites
from support.optax_chains import chain_of_optax
from support.own_models import plain_loss
from support.plans import step_plan_on
from support.small_runs import (
    finish,
    losses,
    remove_checkpoint,
    train,
    write_config,
)

from geojax import make_mesh
from geojax.config.run_config import RunConfig
from geojax.data import Corpus, Loader
from geojax.models.declaration import kind_by_name
from geojax.optim import make_optimizer
from geojax.precision import policy
from geojax.step.state import initial_state, state_layouts

STEPS = 4
SETTINGS = {
    "steps": STEPS,
    "simulate_devices": 4,
    "mesh": {"dc": 2, "data": 2},
    "precision": "fp64",
    "batch": {"global_batch_size": 8, "sequence_length": 32, "microbatches": 2},
    "evaluation": {"interval": STEPS, "sequences": 8},
    "checkpoint": {"interval": 2},
    # The same at every step, however many there are.
    "optimizer": {"peak_learning_rate": 3e-3, "final_learning_rate": 3e-3, "warmup_steps": 0},
}
SIZES = {"vocab_size": 301, "width": 16, "layers": 4}
STATE_SPACE = SETTINGS | {"model": {"module": "examples.state_space:build", **SIZES, "layers": 6}}
LINEN = SETTINGS | {
    "model": {"module": "examples.linen_transformer:build", **SIZES},
    "simulate_devices": 2,
    "mesh": {"dc": 2, "stage": 2},
    "dc": {"join": "islands", "role": "stage"},
    "pipeline": {"schedule": "zero_bubble_h1"},
}
ONE_PROGRAM = {"steps": 2, "simulate_devices": 4, "mesh": {"dc": 2, "data": 2}, "dc": {}}
ONE_PROGRAM |= {"pipeline": {}}


def initial_weights(config):
    """Those of the run, made by the same program."""
    mesh = make_mesh(devices=jax.devices()[:4], dc=2, data=2)
    plan = step_plan_on(mesh, policy("fp64"))
    optimizer = make_optimizer(config.optimizer, config.steps)
    layouts = state_layouts(config.model, optimizer, plan)
    state = initial_state(config.model, optimizer, layouts, plan, config.seed)
    return whole_state.on_host(state.parameters, layouts.parameters)


def losses_of_modules(path):
    """Each step's loss by `jax.jit` and optax on one device, of the batches that the run reads."""
    config = RunConfig.load(path)
    loader = Loader(
        Corpus.open(config.data),
        sequence_length=config.batch.sequence_length,
        global_batch_size=config.batch.global_batch_size,
        sequences=list(range(config.batch.global_batch_size)),
        seed=config.seed,
        vocab_size=config.model.vocab_size,
        validation_sequences=8,
    )
    with jax.enable_x64():
        optimizer = chain_of_optax(config.optimizer, config.steps, kind_by_name)

        @jax.jit
        def step(parameters, state, batch):
            of_model = functools.partial(plain_loss, config.model)
            loss, gradients = jax.value_and_grad(of_model)(parameters, batch)
            updates, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state, loss

        parameters = jax.tree.map(jnp.asarray, initial_weights(config))
        state, found = optimizer.init(parameters), {}
        for number in range(STEPS):
            batch = {name: jnp.asarray(each) for name, each in loader.batch(number).items()}
            parameters, state, loss = step(parameters, state, batch)
            found[number + 1] = float(loss)
    return found


def assert_equal_losses(run, path):
    wanted = losses_of_modules(path)
    found = losses(run)
    assert sorted(found) == sorted(wanted)
    np.testing.assert_allclose([found[each] for each in wanted], list(wanted.values()), rtol=1e-10)


def test_a_state_space_trains_in_one_program_and_resumes_to_the_bit(corpus, tmp_path):
    path = write_config(tmp_path / "run.yaml", corpus, **STATE_SPACE)
    run, again = tmp_path / "run", tmp_path / "again"
    made = train(path)
    assert made.returncode == 0, made.stdout + made.stderr
    assert_equal_losses(run, path)
    shutil.copytree(run, again)
    remove_checkpoint(again, STEPS)
    made = train(path, "--run_directory", str(again), "--resume")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "resuming from step 2" in made.stdout
    assert losses(again) == losses(run)


def test_layers_of_linen_train_as_stages_of_islands_and_resume_to_the_bit(corpus, tmp_path):
    path = write_config(tmp_path / "run.yaml", corpus, **LINEN)
    run, again = tmp_path / "run", tmp_path / "again"
    # Weights drawn by the program of a stage are others in the last bit of a float32.
    begun = train(write_config(tmp_path / "begun.yaml", corpus, **LINEN | ONE_PROGRAM))
    assert begun.returncode == 0, begun.stdout + begun.stderr
    wanted = losses_of_modules(path)
    for folder in (run, again):
        sites = start_sites(path, "--run_directory", str(folder))
        for process, printed in zip(sites, finish(*sites), strict=True):
            assert process.returncode == 0, printed
            assert "resuming from step 2" in printed
        if folder == run:
            shutil.copytree(run, again)
            remove_checkpoint(again, STEPS)
    found = losses(run / "east")
    for step in (3, 4):
        assert abs(found[step] - wanted[step]) <= 1e-10 * wanted[step]
    assert losses(again / "east") == found


def test_another_file_of_the_model_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "mine.py"
    module.write_text("from support.own_models import build\n")
    settings = {"model": {"module": "mine:build", "vocab_size": 301}, "simulate_devices": 1}
    path = write_config(tmp_path / "run.yaml", corpus, **SETTINGS | settings | {"mesh": {}})
    first = train(path, "--steps", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    module.write_text("from support.own_models import build as build  # as it was\n")
    second = train(path)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "changed since step 2: the file of model.module mine:build" in second.stdout
    third = train(path, "--model.layers", "6", "--steps", "6")
    assert third.returncode == 2
    assert "is a checkpoint of another model: model.layers is" in third.stderr
