"""Runs of sites with runtimes of their own: steps, validation and checkpoints of one program."""

import concurrent.futures
import functools

import jax
import numpy as np
import pytest
from support import whole_state
from support.small_models import make_batch

from geojax import make_mesh
from geojax.checkpoint import Checkpointer
from geojax.train.compiled_run import CompiledRun, step_plan
from geojax.train.config import RunConfig
from geojax.train.island_run import IslandRun, island_plan, make_site_mesh, sequences_of_site
from geojax.transport import loopback

SITES, ROWS = 2, 16
REQUESTS = {"stop": True, "save": False}
CONFIG = {
    "run_directory": "unused",
    "steps": 10,
    "mesh": {"dc": SITES, "data": 2},
    "model": {
        "num_hidden_layers": 2,
        "hidden_size": 20,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 36,
        "vocab_size": 61,
        "max_position_embeddings": 32,
        "dropout": 0.1,
    },
    "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
    "batch": {"global_batch_size": ROWS, "sequence_length": 32, "microbatches": 2},
    "precision": "fp64",
    "optimizer": {"warmup_steps": 1},
}


@pytest.fixture(scope="module", autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


@functools.cache
def config(join):
    return RunConfig.model_validate(CONFIG | {"dc": {"join": join}})


@functools.cache
def one_program():
    mesh = make_mesh(devices=jax.devices()[:4], **CONFIG["mesh"])
    own = config("one_program")
    return CompiledRun.build(own, step_plan(own, mesh), validate=True)


class Islands:
    """All sites of the run, each in a thread."""

    def __init__(self):
        own = config("islands")
        self.runs = []
        for transport in loopback(SITES):
            devices = jax.devices()[2 * transport.site :][:2]
            plan = island_plan(own, make_site_mesh(own, devices))
            self.runs.append(IslandRun.build(own, plan, transport, validate=True))
        self.states = [run.initial_state() for run in self.runs]

    def all(self, function, *arguments):
        def one(*each):
            with jax.enable_x64(True):
                return function(*each)

        with concurrent.futures.ThreadPoolExecutor(SITES) as threads:
            return list(threads.map(one, self.runs, self.states, *arguments))

    def shares(self, batch):
        rows = [sequences_of_site(run.config, run.plan, n) for n, run in enumerate(self.runs)]
        return [{name: leaf[own] for name, leaf in batch.items()} for own in rows]

    def step(self, batch):
        made = self.all(lambda run, state, own: run.step(state, own, REQUESTS), self.shares(batch))
        self.states = [state for state, _ in made]
        return [jax.device_get(metrics) for _, metrics in made]

    def evaluate(self, batch):
        return self.all(lambda run, state, own: run.evaluate(state, own), self.shares(batch))


def whole(run, state):
    return jax.device_get(whole_state.trim(state, run.layouts, run.plan.mesh))


def close(one, other):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13), one, other)


@pytest.fixture(scope="module")
def batches():
    return [make_batch(config("islands").model, seed, ROWS) for seed in range(4)]


@pytest.fixture(scope="module")
def trained(batches):
    """Both kinds of run after two steps, and the metrics of the last one."""
    run, islands = one_program(), Islands()
    state = run.initial_state()
    for batch in batches[:2]:
        state, metrics = run.step(state, batch, REQUESTS)
        of_sites = islands.step(batch)
    return state, jax.device_get(metrics), islands, of_sites


def test_steps_are_those_of_one_program(trained):
    state, metrics, islands, of_sites = trained
    assert of_sites[0].pop("stop") == SITES
    for name, value in of_sites[0].items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-10, err_msg=name)
    for run, own in zip(islands.runs, islands.states, strict=True):
        close(whole(run, own), whole(one_program(), state))


def test_validation_is_that_of_one_program(trained, batches):
    state, _, islands, _ = trained
    first, second = islands.evaluate(batches[2])
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, one_program().evaluate(state, batches[2]), rtol=1e-10)


def test_facts_count_the_messages_of_a_step(trained):
    facts = trained[2].runs[0].facts
    assert facts.tokens_per_step == ROWS * 32
    # Every parameter once, in float64, padded to the two ranks of a site.
    parameters = sum(
        leaf.size for leaf in jax.tree.leaves(whole(one_program(), trained[0]).parameters)
    )
    assert facts.cross_site.bytes == pytest.approx(8 * parameters, rel=0.05)


def test_checkpoints_go_from_islands_to_one_program_and_back(trained, batches, tmp_path):
    state, _, islands, _ = trained
    run, own = one_program(), islands.runs[0]
    model = config("islands").model.model_dump(mode="json")
    with Checkpointer(tmp_path / "site", own.plan.mesh) as checkpoints:
        own.save(checkpoints, 2, islands.states[0], {"model": model})
    with Checkpointer(tmp_path / "site", run.plan.mesh) as checkpoints:
        resumed, metadata = run.restore(checkpoints, model)
    assert metadata["step"] == 2
    close(whole(run, resumed), whole(run, state))
    with Checkpointer(tmp_path / "all", run.plan.mesh) as checkpoints:
        run.save(checkpoints, 2, resumed, {"model": model})
    again = Islands()
    for site, each in enumerate(again.runs):
        with Checkpointer(tmp_path / "all", each.plan.mesh) as checkpoints:
            again.states[site], _ = each.restore(checkpoints, model)
    again.step(batches[3])
    continued, _ = run.step(resumed, batches[3], REQUESTS)
    for each, own in zip(again.runs, again.states, strict=True):
        close(whole(each, own), whole(run, continued))
