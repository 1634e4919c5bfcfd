"""The validation pass: by microbatches, with the memory that the table says, and only if wanted."""

import functools
from pathlib import Path

import jax
import numpy as np
from support.distances import assert_no_further_than, distances
from support.plans import step_plan_on
from support.resolving import compiled_run
from support.small_models import model_of

from geojax import make_mesh
from geojax.config.run_config import RunConfig
from geojax.models import loss_sum, parameter_count
from geojax.optim import OptimizerSettings, make_optimizer
from geojax.planner.memory import CompiledMemory
from geojax.planner.resolve.traced_run import trace_run
from geojax.precision import policy
from geojax.sharding import bytes_per_device
from geojax.step.config_plan import make_run_mesh
from geojax.step.plan import SIGNALS
from geojax.step.program import batch_shape, trace_evaluation
from geojax.step.state import state_layouts
from geojax.train.compiled_run import CompiledRun

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
NO_REQUESTS = dict.fromkeys(SIGNALS, False)
SHAPE = ("--model", "tiny", "--batch.sequence_length", "128", "--batch.global_batch_size", "64")


@functools.cache
def run_of(microbatches):
    config = RunConfig.load(QUICKSTART, (*SHAPE, "--batch.microbatches", str(microbatches)))
    return compiled_run(config, make_run_mesh(config), validate=True)


def random_batch(config):
    shape = config.batch.global_batch_size, config.batch.sequence_length
    draw = np.random.default_rng(3)
    tokens = draw.integers(0, config.model.vocab_size, (2, *shape), np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return {
        "tokens": tokens[0],
        "targets": tokens[1],
        "loss_mask": draw.integers(0, 2, shape).astype(np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": positions,
        "row": np.arange(shape[0], dtype=np.int32),
    }


def exact_loss(run, batch):
    """The sum of the losses of the run's first weights, on one device in float64."""
    weights = jax.device_get(run.whole_weights(run.initial_state()))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
        return jax.device_get(jax.jit(loss_sum, static_argnums=2)(wide, batch, run.config.model))[0]


def test_microbatches_do_not_change_the_loss_and_save_memory():
    batch = random_batch(run_of(1).config)
    whole, parts = (
        jax.device_get(run.evaluate(run.initial_state(), batch)) for run in map(run_of, (1, 8))
    )
    assert whole[1] == parts[1] == batch["loss_mask"].sum()
    exact = exact_loss(run_of(1), batch)
    errors = [distances({"loss": loss}, {"loss": exact}) for loss, _ in (whole, parts)]
    assert_no_further_than(*errors)
    gathered = 4 * parameter_count(run_of(1).config.model)
    temporaries = [
        CompiledMemory.of(run_of(microbatches).evaluation_program).temporaries - gathered
        for microbatches in (1, 8)
    ]
    assert temporaries[1] < temporaries[0] / 2


def test_a_validation_judges_by_the_likelihood_alone():
    """As `geojax evaluate` does: what is added to the loss in training is not in it."""
    plan = step_plan_on(make_mesh(devices=jax.devices()[:1]), policy("fp32"))
    programs = set()
    for coefficient in (0.0, 0.1):
        model = model_of("llama").replace(num_hidden_layers=1, z_loss_coef=coefficient)
        layouts = state_layouts(model, make_optimizer(OptimizerSettings(), 1), plan)
        programs.add(trace_evaluation(layouts, model, plan, batch_shape(2, 16)).lower().as_text())
    assert len(programs) == 1


def test_the_pass_takes_no_more_memory_than_a_step_is_estimated_to():
    run = run_of(1)
    step = trace_run(run.config)
    unread = bytes_per_device(step.layouts) - bytes_per_device(step.layouts.parameters)
    assert CompiledMemory.of(run.evaluation_program).bytes + unread < step.memory.bytes


def test_a_run_without_validation_sets_compiles_no_pass(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("no validation pass must be traced")

    run = run_of(1)
    monkeypatch.setattr("geojax.train.compiled_run.trace_evaluation", refuse)
    assert CompiledRun.build(run.config, run.resolved, run.plan).evaluation_program is None


def test_stages_that_share_the_head_evaluate_and_train_alike():
    """In each of two sites, to whose stages positions do not divide, and in the last of two."""
    shape = ("--mesh.dc", "2", "--mesh.stage", "2", "--batch.sequence_length", "126")
    options = ("--batch.microbatches", "4", "--model.num_hidden_layers", "4")
    layouts = {
        "in each": ("--mesh.data", "1", "--mesh.tensor", "2", "--parallelism.sequence", "true"),
        "through both": ("--mesh.data", "2", "--dc.role", "stage"),
    }
    for name, layout in layouts.items():
        heads = ["last_stage", "positions", *(["vocabulary"] if name == "in each" else [])]
        found = []
        for head in heads:
            given = (*SHAPE, *shape, *options, *layout, "--pipeline.head", head)
            config = RunConfig.load(QUICKSTART, given)
            run = compiled_run(config, make_run_mesh(config), validate=True)
            batch, state = random_batch(config), run.initial_state()
            evaluated = jax.device_get(run.evaluate(state, batch))
            found.append((evaluated, jax.device_get(run.step(state, batch, NO_REQUESTS)[1])))
        (alone, before), *others = found
        for shared, after in others:
            np.testing.assert_allclose(shared, alone, rtol=1e-6)
            for number in ("loss", "gradient_norm"):
                np.testing.assert_allclose(after[number], before[number], rtol=1e-5)
