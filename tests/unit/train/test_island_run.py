"""Runs of sites with runtimes of their own: steps, validation and checkpoints of one program."""

import concurrent.futures
import copy
import dataclasses
import functools
import gc
import math
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import whole_state
from support.resolving import compiled_run, island_run, step_of
from support.small_models import make_batch

from geojax import make_mesh
from geojax.checkpoint import Checkpointer, manifest
from geojax.config.run_config import RunConfig
from geojax.errors import RunError, UserError
from geojax.islands.island_plan import (
    make_site_mesh,
    own_stages,
    process_groups,
    sequences_of_site,
)
from geojax.islands.site_state import SiteState
from geojax.planner.fp8_products import check_fp8_products
from geojax.planner.resolve.site_schedule import held_at_once, held_microbatches
from geojax.train import run_state
from geojax.train.facts import run_facts
from geojax.train.islands.site_saves import SiteSaves
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
    """In all threads, those of the stages too."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


STAGES = {
    "mesh": {"dc": SITES, "stage": 2, "data": 2},
    "dc": {"role": "stage"},
    # Two stages of other lengths in each site; a table that the first and the last one hold.
    "model": CONFIG["model"] | {"num_hidden_layers": 5, "tie_word_embeddings": True},
    "pipeline": {"schedule": "1f1b", "layers": [1, 2, 1, 1]},
}
NAMES = ("east", "west")


@functools.cache
def config(join, role="data"):
    return RunConfig.model_validate(
        CONFIG | (STAGES if role == "stage" else {}) | {"dc": {"role": role, "join": join}}
    )


@functools.cache
def one_program(role="data"):
    own = config("one_program", role)
    mesh = make_mesh(devices=jax.devices()[: own.mesh.devices], **own.mesh.model_dump())
    return compiled_run(own, mesh, validate=True)


class Islands:
    """All sites of the run, each in a thread."""

    def __init__(self, role="data"):
        own = config("islands", role)
        self.role, self.runs = role, []
        for transport in loopback(SITES):
            transport.site_names = NAMES
            count = own.mesh.devices // SITES
            devices = jax.devices()[count * transport.site :][:count]
            self.runs.append(island_run(own, make_site_mesh(own, devices), transport))
        self.states = [run.initial_state() for run in self.runs]
        self.takes_over = False

    def all(self, function, *arguments):
        with concurrent.futures.ThreadPoolExecutor(SITES) as threads:
            return list(threads.map(function, self.runs, self.states, *arguments))

    def shares(self, batch):
        rows = [sequences_of_site(run.config, run.plan, n) for n, run in enumerate(self.runs)]
        return [{name: leaf[own] for name, leaf in batch.items()} for own in rows]

    def step(self, batch):
        made = self.all(lambda run, state, own: run.step(state, own, REQUESTS), self.shares(batch))
        self.states = [state for state, _ in made]
        return [jax.device_get(metrics) for _, metrics in made]

    def checkpoints(self, run, folder, report=print):
        site = run.transport.site
        return Checkpointer(
            folder,
            run.plan.mesh,
            sites=NAMES,
            island=NAMES[site],
            saves_of_sites=SiteSaves(run.transport, run.plan.mesh, takes_over=self.takes_over),
            report=report,
        )

    def save(self, folder, metadata):
        def save(run, state):
            with self.checkpoints(run, folder) as checkpoints:
                run_state.save(run, checkpoints, int(state.step), state, metadata)

        self.all(save)

    def restore(self, folders, model):
        """Restore at all sites; what each of them reports."""
        told = [[] for _ in folders]

        def restore(run, state, folder, told):
            with self.checkpoints(run, folder, told.append) as checkpoints:
                return run_state.restore(run, checkpoints, model)[0]

        self.states = self.all(restore, folders, told)
        return told

    def evaluate(self, batch):
        return self.all(lambda run, state, own: run.evaluate(state, own), self.shares(batch))


def whole(run, state):
    return whole_state.on_host(state, run.layouts)


def whole_site(run, state):
    """The state of a site in role data."""
    (own,) = state.stages
    return whole_state.on_host(own, run.layouts)


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
        close(whole_site(run, own), whole(one_program(), state))


def test_validation_is_that_of_one_program(trained, batches):
    state, _, islands, _ = trained
    first, second = islands.evaluate(batches[2])
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, one_program().evaluate(state, batches[2]), rtol=1e-10)


def test_facts_count_the_messages_of_a_step(trained):
    run = trained[2].runs[0]
    facts = run_facts(run.config, run.plan, None, run.links.sent_bytes, run.sequences)
    assert facts.tokens_per_step == ROWS * 32
    # Every parameter once, in float64, padded to the two ranks of a site.
    parameters = sum(
        leaf.size for leaf in jax.tree.leaves(whole(one_program(), trained[0]).parameters)
    )
    assert facts.cross_site_bytes == pytest.approx(8 * parameters, rel=0.05)


def test_traffic_of_a_step_names_sites_bytes_and_the_causes_of_waits(trained):
    for run, peer in zip(trained[2].runs, NAMES[::-1], strict=True):
        (site, traffic), *others = run.links.traffic().items()
        assert (site, others) == (peer, [])
        assert traffic.sent_bytes == traffic.received_bytes == run.links.sent_bytes
        # Two buckets and the scalars.
        assert 1 <= traffic.messages_in_flight <= 3
        assert set(traffic.wait_seconds) == {"bucket", "scalars", "offer"}
        assert all(waited >= 0 for waited in traffic.wait_seconds.values())


def test_as_many_microbatches_are_held_as_fit(trained):
    run = trained[2].runs[0]
    step = run.stages.walks[0].programs.step_bytes
    # The stream before and after each layer is among what two of eight sequences keep in float64.
    assert step.of_microbatch > 2 * ROWS // 2 // 4 * 32 * 20 * 8
    parameters = sum(math.prod(each.shape) for each in jax.tree.leaves(run.layouts.parameters))
    # Weights and gradients are whole on each device; messages are shards: of this step, of the one
    # before, and of the other site; and so is the total.
    assert step.always == pytest.approx((2 + 4 / 2) * 8 * parameters, rel=0.1)
    assert held_microbatches(step, None) > 1000
    assert held_microbatches(step, 0) == 1
    assert held_microbatches(step, step.always + 5 * step.of_microbatch) == 4


def test_no_more_microbatches_are_held_than_a_limit_in_bytes_allows(trained):
    programs = trained[2].runs[0].stages.walks[0].programs
    one = programs.step_bytes.of_microbatch

    def held(limit):
        pipeline = config("islands").pipeline.model_copy(update={"memory_limit_bytes": limit})
        own = config("islands").model_copy(update={"pipeline": pipeline})
        return held_at_once(own, programs, None)

    assert (held(one), held(2 * one - 1), held(2 * one), held(9 * one)) == (1, 1, 2, 2)
    with pytest.raises(
        UserError, match=r"a site holds (.*) of a microbatch where .* \1 would work"
    ):
        held(one - 1)


def test_checkpoints_go_from_islands_to_one_program_and_back(trained, batches, tmp_path):
    state, _, islands, _ = trained
    run = one_program()
    model = config("islands").model.model_dump(mode="json")
    islands.save(tmp_path, {"model": model})
    with Checkpointer(tmp_path, run.plan.mesh, sites=NAMES) as checkpoints:
        resumed, metadata = run_state.restore(run, checkpoints, model)
    assert metadata["step"] == 2
    close(whole(run, resumed), whole(run, state))
    with Checkpointer(tmp_path / "all", run.plan.mesh) as checkpoints:
        run_state.save(run, checkpoints, 2, resumed, {"model": model})
    again = copy.copy(islands)
    again.restore([tmp_path / "all"] * SITES, model)
    again.step(batches[3])
    continued, _ = run.step(resumed, batches[3], REQUESTS)
    for each, own in zip(again.runs, again.states, strict=True):
        close(whole_site(each, own), whole(run, continued))


def test_sites_with_other_weights_save_nothing(trained, tmp_path):
    *_, islands, _ = trained
    own = [state.stages[0] for state in islands.states]
    moved = jax.tree.map(jnp.copy, own[1])
    scale = moved.parameters["final_norm"]["scale"]
    moved.parameters["final_norm"]["scale"] = scale.at[3].add(1e-12)
    islands.states = [
        SiteState((dataclasses.replace(each, step=each.step + 1),)) for each in (own[0], moved)
    ]
    with pytest.raises(RunError, match="step 3: the weights of site 1 are not those of site 0"):
        islands.save(tmp_path, {})
    assert not list(tmp_path.rglob("3"))
    islands.states = [SiteState((each,)) for each in own]


@pytest.fixture
def two_disks(trained, tmp_path):
    """Folders of the checkpoints of steps 2 and 3 of each site, which sees its own alone."""
    *_, islands, _ = trained
    own, model = islands.states, config("islands").model.model_dump(mode="json")
    islands.save(tmp_path / "both", {"model": model})
    islands.states = [
        SiteState((dataclasses.replace(each.stages[0], step=each.step + 1),)) for each in own
    ]
    islands.save(tmp_path / "both", {"model": model})
    folders = [tmp_path / f"disk of {name}" for name in NAMES]
    for folder, name in zip(folders, NAMES, strict=True):
        shutil.copytree(tmp_path / "both" / name, folder / name)
    yield folders, model
    islands.states = own


def test_sites_restore_the_newest_step_that_all_have(trained, two_disks):
    *_, islands, _ = trained
    (east, west), model = two_disks
    shutil.rmtree(west / "west" / "3")
    told = islands.restore([east, west], model)
    assert [int(state.step) for state in islands.states] == [2, 2]
    for folder, (line,) in zip((east, west), told, strict=True):
        assert line == (
            f"{folder}: step 3 is not whole (site west lacks it); restoring step 2 instead"
        )


def test_sites_restore_another_step_where_one_finds_its_part_damaged(trained, two_disks):
    *_, islands, _ = trained
    (east, west), model = two_disks
    damaged = next(path for path in (east / "east" / "3").rglob("d/*"))
    damaged.write_bytes(damaged.read_bytes()[::-1])
    of_east, of_west = islands.restore([east, west], model)
    assert [int(state.step) for state in islands.states] == [2, 2]
    assert "has been changed" in of_east[0]
    assert "step 3 is not whole (site east lacks it); restoring step 2 instead" in of_west[0]


def test_a_site_without_checkpoints_learns_what_to_copy(trained, two_disks):
    *_, islands, _ = trained
    (east, west), model = two_disks
    shutil.rmtree(west / "west")
    with pytest.raises(UserError) as told:
        islands.restore([east, west], model)
    assert str(told.value) == (
        f"{east}: site west lacks step 3, which site east has, and the sites have no other in "
        "common. To resume, copy checkpoints/east/3 of site east to the same place at site west, "
        "or remove the checkpoints of all sites to start anew"
    )
    shutil.copytree(east / "east" / "3", west / "east" / "3")
    islands.restore([east, west], model)
    assert [int(state.step) for state in islands.states] == [3, 3]
    first, second = (whole_site(*each) for each in zip(islands.runs, islands.states, strict=True))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.fixture
def taking_over(trained):
    """Sites that go on from the newest save of any of them."""
    *_, islands, _ = trained
    islands.takes_over = True
    yield islands
    islands.takes_over = False


def with_manifest(folder, **changes):
    """Change what the manifest of a checkpoint says."""
    content = manifest.read(folder)
    files = content.pop("files")
    manifest.write(folder, content | changes, files)


@pytest.mark.parametrize("lost", ["west/3", "west"])
def test_a_site_takes_the_newest_state_of_another_one(taking_over, two_disks, lost):
    islands, ((east, west), model) = taking_over, two_disks
    shutil.rmtree(west / lost)
    told = islands.restore([east, west], model)
    assert [int(state.step) for state in islands.states] == [3, 3]
    first, second = (whole_site(*each) for each in zip(islands.runs, islands.states, strict=True))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    for lines in told:
        assert "site west takes step 3, the newest of all sites, from site east: " in lines[-1]


def test_a_site_whose_part_is_damaged_takes_that_of_another_one(taking_over, two_disks):
    islands, ((east, west), model) = taking_over, two_disks
    damaged = next(path for path in (east / "east" / "3").rglob("d/*"))
    damaged.write_bytes(damaged.read_bytes()[::-1])
    of_east, _ = islands.restore([east, west], model)
    assert [int(state.step) for state in islands.states] == [3, 3]
    assert "has been changed" in of_east[0]
    assert "site east takes step 3, the newest of all sites, from site west" in of_east[-1]


def test_the_save_under_the_latest_membership_counts(taking_over, two_disks, tmp_path):
    islands, ((east, west), model) = taking_over, two_disks
    shutil.rmtree(east / "east" / "3")
    shutil.rmtree(west / "west" / "2")
    with_manifest(east / "east" / "2", membership_id=5)
    of_east, of_west = islands.restore([east, west], model)
    assert [int(state.step) for state in islands.states] == [2, 2]
    assert "site west takes step 2" in of_east[-1]
    assert "step 3 is not whole (site east lacks it); restoring step 2 instead" in of_west[0]


@pytest.fixture(scope="module")
def stages():
    """As `trained`, with the sites as stages of one pipeline."""
    run, islands = one_program("stage"), Islands("stage")
    state = run.initial_state()
    for seed in range(2):
        batch = make_batch(run.config.model, seed, ROWS)
        state, metrics = run.step(state, batch, REQUESTS)
        of_sites = islands.step(batch)
    return state, jax.device_get(metrics), islands, of_sites


def test_stages_train_and_validate_as_one_program(stages):
    state, metrics, islands, of_sites = stages
    np.testing.assert_equal(of_sites[0], of_sites[1])
    assert of_sites[0].pop("stop") == SITES
    for name, value in of_sites[0].items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-10, err_msg=name)
    batch = make_batch(config("islands", "stage").model, 7, ROWS)
    first, second = islands.evaluate(batch)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, one_program("stage").evaluate(state, batch), rtol=1e-10)


def test_checkpoints_go_from_stages_to_one_program_and_back(stages, tmp_path):
    state, _, islands, _ = stages
    run = one_program("stage")
    model = run.config.model.model_dump(mode="json")
    islands.save(tmp_path / "islands", {"model": model})
    assert {folder.name for folder in (tmp_path / "islands").iterdir()} == set(NAMES)
    with Checkpointer(tmp_path / "islands", run.plan.mesh, sites=NAMES) as checkpoints:
        resumed, metadata = run_state.restore(run, checkpoints, model)
    assert metadata["step"] == 2
    close(whole(run, resumed), whole(run, state))
    with Checkpointer(tmp_path / "one", run.plan.mesh, sites=NAMES) as checkpoints:
        run_state.save(run, checkpoints, 2, resumed, {"model": model})
    again = copy.copy(islands)
    for site, name in enumerate(NAMES):  # each sees its own folder alone
        shutil.copytree(tmp_path / "one" / name, tmp_path / str(site) / name)
    again.restore([tmp_path / str(site) for site in range(SITES)], model)
    for mine, own in zip(again.states, islands.states, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, own)


def test_sites_with_other_tied_tables_save_nothing(stages, tmp_path):
    islands = stages[2]
    own = islands.states
    first, last = own
    moved = jax.tree.map(jnp.copy, last.stages[1])
    table = moved.parameters["embedding"]["tokens"]
    table["embedding"] = table["embedding"].at[3, 2].add(1e-12)
    try:
        islands.states = [
            SiteState(tuple(dataclasses.replace(each, step=each.step + 1) for each in of_site))
            for of_site in (first.stages, (last.stages[0], moved))
        ]
        with pytest.raises(RunError, match="step 3: the weights of site 1 are not those of site 0"):
            islands.save(tmp_path, {})
        assert not list(tmp_path.rglob("3"))
    finally:
        islands.states = own


def changed(islands, **changes):
    """The same islands planned anew, with copies of their states."""
    anew = copy.copy(islands)
    other = islands.runs[0].config.model_copy(update=changes)
    step = step_of(other, list(islands.runs[0].plan.mesh.devices.flat))
    anew.runs = islands.all(lambda run, _: run.replanned(step))
    copies = [jax.tree.map(jnp.copy, state) for state in islands.states]
    anew.states = [run.adopt(each) for run, each in zip(anew.runs, copies, strict=True)]
    return anew


def left_by(action):
    """Bytes of arrays that are there after an action and were not before, collected by nobody."""

    def held():
        return sum(array.nbytes for array in jax.live_arrays())

    action()  # compiles
    gc.collect()
    gc.disable()
    try:
        before = held()
        action()
        return held() - before
    finally:
        gc.enable()


@pytest.mark.parametrize("role", ["trained", "stages"])
def test_arrays_of_a_pass_wait_for_no_collector(role, request):
    islands = copy.copy(request.getfixturevalue(role)[2])
    islands.states = [jax.tree.map(jnp.copy, state) for state in islands.states]
    batch = make_batch(islands.runs[0].config.model, 6, ROWS)
    assert left_by(lambda: islands.step(batch)) == 0
    assert left_by(lambda: islands.evaluate(batch)) == 0


def test_islands_planned_anew_compress_their_gradients(trained, batches):
    state, _, islands, _ = trained
    own = islands.runs[0].config
    assert islands.runs[0].replanned(islands.runs[0].resolved) is None
    communication = own.communication.model_copy(update={"gradient_compression": "int8"})
    anew = changed(islands, communication=communication)
    for run, own in zip(anew.runs, anew.states, strict=True):
        assert run.links.sent_bytes < 0.2 * islands.runs[0].links.sent_bytes
        assert not any(leaf.any() for leaf in jax.tree.leaves(own.stages[0].error_feedback))
    for batch in batches[2:]:
        first, second = anew.step(batch)
        np.testing.assert_equal(first, second)
    assert any(leaf.any() for leaf in jax.tree.leaves(anew.states[0].stages[0].error_feedback))
    # Rounded gradients of the third step are in the loss of the fourth.
    exact = jax.tree.map(jnp.copy, state)
    for batch in batches[2:]:
        exact, metrics = one_program().step(exact, batch, REQUESTS)
    np.testing.assert_allclose(first["loss"], metrics["loss"], rtol=1e-4)


def test_stages_planned_anew_go_on_in_another_order(stages):
    state, _, islands, _ = stages
    run = one_program("stage")
    order = run.config.pipeline.model_copy(update={"schedule": "gpipe"})
    anew = changed(islands, pipeline=order)
    # The last stage is the one that 1f1b lets begin its backwards early.
    before, after = (each.runs[1].stages.walks[1].actions for each in (islands, anew))
    assert after != before
    batch = make_batch(run.config.model, 5, ROWS)
    _, expected = run.step(jax.tree.map(jnp.copy, state), batch, REQUESTS)
    for metrics in anew.step(batch):
        for name in ("loss", "gradient_norm"):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-10, err_msg=name)


def test_a_stage_that_lacks_layers_says_so(stages, tmp_path):
    islands = stages[2]
    model = islands.runs[0].config.model.model_dump(mode="json")
    islands.save(tmp_path, {"model": model})
    shutil.copytree(tmp_path / "east", tmp_path / "alone" / "east")
    told = "site west lacks step 2, .* put checkpoints/west/2 back at site west, or remove"
    with pytest.raises(UserError, match=told):
        islands.restore([tmp_path, tmp_path / "alone"], model)


def test_three_sites_of_virtual_stages_in_fp8_agree_on_their_messages():
    model = {"num_hidden_layers": 12, "tie_word_embeddings": True}
    changes = {
        "mesh": {"dc": 3, "stage": 2},
        "dc": {"role": "stage", "join": "islands"},
        "model": CONFIG["model"] | model,
        "precision": "fp8-delayed",
        "batch": CONFIG["batch"] | {"microbatches": 8},
        "pipeline": {"schedule": "interleaved", "virtual_stages": 2},
    }
    own = RunConfig.model_validate(CONFIG | changes)
    runs = []
    for transport in loopback(3):
        mesh = make_site_mesh(own, jax.devices()[2 * transport.site :][:2])
        runs.append(island_run(own, mesh, transport))
    for site, run in enumerate(runs):
        assert run.table_sites == [0, 2]
        for other, peer in enumerate(runs):
            np.testing.assert_array_equal(
                run.links.bytes_by_site[other], peer.links.bytes_by_site[site][::-1]
            )
    # Activations leave from the last stage of a site, their cotangents from the first one.
    assert [
        runs[0].links.stage_bytes[:, 1, 0].argmax(),
        runs[1].links.stage_bytes[:, 0, 0].argmax(),
    ] == [1, 0]
    assert runs[0].links.bytes_by_site[1, 0] > 4 * runs[0].links.bytes_by_site[2, 0] > 0


def test_products_that_xla_does_not_make_in_fp8_end_the_run():
    own = config("islands").model_copy(update={"precision": "fp8-delayed"})
    mesh = make_site_mesh(own, jax.devices()[:2])
    run = island_run(own, mesh, loopback(SITES)[0])
    assert run.fp8_programs == []  # the reference multiplies in the compute dtype
    on_gpus = dataclasses.replace(run.plan, fp8_backend="xla")
    programs = dataclasses.replace(run, plan=on_gpus).fp8_programs
    with pytest.raises(UserError, match=r"of the 21 matrix products of a layer XLA made only 0"):
        check_fp8_products(programs, own.model, on_gpus)


def site_of(*processes):
    """A site's mesh, whose stages have a device of each of these processes."""
    devices = np.array([[types.SimpleNamespace(process_index=n) for n in own] for own in processes])
    return types.SimpleNamespace(
        axis_names=("stage", "data"), shape={"stage": len(processes)}, devices=devices
    )


def test_processes_of_a_site_are_grouped_by_the_stages_that_they_hold():
    assert process_groups(site_of((0, 0), (0, 0))) == 1
    assert process_groups(site_of((0, 0), (0, 0), (1, 1), (1, 1))) == 2
    assert process_groups(site_of((0, 0, 1, 1), (2, 2, 3, 3))) == 2
    assert process_groups(site_of((0, 1, 2))) == 1
    assert own_stages(site_of((0,), (0,), (1,), (1,))) == [0, 1]
    # A process a host of eight: llama3-70b-2x64-stage.yaml and nemotron4-340b-2x1536-stage.yaml.
    for hosts, stages in ((8, 2), (192, 6)):
        assert process_groups(site_of(*np.repeat(range(hosts), 8).reshape(stages, -1))) == stages
    with pytest.raises(UserError, match=r"mesh\.stage=2 requires .*; got 3\. Start 1 or 6, or"):
        process_groups(site_of((0, 0, 1), (1, 2, 2)))
    with pytest.raises(UserError, match=r"process 2 is on a host before that of process 1"):
        process_groups(site_of((0, 2), (1, 3)))
