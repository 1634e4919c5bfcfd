"""A site that died returns to the run at a boundary of a step, with the same bits."""

import time
import types

import jax
import jax.numpy as jnp
import pytest
from jax._src.test_util import count_pjit_cpp_cache_miss
from support.mortal_islands import NAMES, TAKEN, Death, assert_same

from geojax.errors import RunError
from geojax.islands.going_on import deciding_process
from geojax.islands.going_on.handing_over import Incoming
from geojax.islands.going_on.returning import catch_up, rehearse
from geojax.islands.going_on.site_membership import SiteMembership
from geojax.islands.walk import Walk
from geojax.membership.events import ApplySums
from geojax.transport.mute import mute

STEPS = 40


@pytest.fixture(scope="module")
def undisturbed(islands, tmp_path_factory):
    return islands.train(tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.mark.parametrize("site", range(len(NAMES)), ids=NAMES)
def test_a_site_that_died_returns_and_changes_no_bit(site, islands, undisturbed, tmp_path):
    run = islands.train(tmp_path, STEPS, [Death(site, 2, 5, returns=True)])
    assert set(run.states) == set(range(len(NAMES)))
    assert 2 < run.returned_at[site] < STEPS
    assert_same(run, undisturbed)
    for other in set(run.states) - {site}:
        assert sum(f"site {NAMES[site]} is lost (" in line for line in run.lines[other]) == 1
        assert sum(f"site {NAMES[site]} is back; " in line for line in run.lines[other]) == 1


@pytest.mark.parametrize("processes", [1, 2, (1, 2, 1), (2, 1, 4)])
def test_a_site_returns_while_another_one_dies_and_returns(
    processes, islands, undisturbed, tmp_path
):
    deaths = [Death(0, 2, 5, returns=True), Death(1, TAKEN, 0, returns=True)]
    run = islands.train(tmp_path, STEPS, deaths, processes=processes)
    assert set(run.states) == set(range(len(NAMES)))
    assert set(run.returned_at) == {0, 1}
    assert_same(run, undisturbed)
    run.assert_processes_agree()


def test_a_site_that_does_not_reach_all_others_does_not_return(islands, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{deciding_process.__name__}.UNREACHED_LEASES", 0.2)
    deaths = [Death(0, 2, 5, returns=True)]
    with pytest.raises(RunError, match="site mid takes part in the run, and does not answer"):
        islands.train(tmp_path, STEPS, deaths, without_door=NAMES.index("mid"))


@pytest.mark.parametrize("processes", [2, (2, 1, 1)])
@pytest.mark.parametrize("process", range(2))
def test_a_site_of_two_processes_returns_as_one(process, processes, islands, undisturbed, tmp_path):
    deaths = [Death(0, 2, 5, returns=True, process=process)]
    run = islands.train(tmp_path, STEPS, deaths, processes=processes)
    assert set(run.states) == set(range(len(NAMES)))
    assert 2 < run.returned_at[0] < STEPS
    assert_same(run, undisturbed)
    run.assert_processes_agree()


def test_a_site_that_returns_takes_sums_one_after_the_other_although_all_have_come(
    islands, tmp_path, monkeypatch
):
    arrived, take, began = Incoming.arrived, SiteMembership.followed_work, []
    taken = []

    def late_state(incoming):
        """Let the state come when the sums of several steps are here."""
        if incoming.note.whole:
            began.append(time.monotonic())
            return arrived(incoming) and time.monotonic() > began[0] + 0.5
        return arrived(incoming)

    def counted(membership):
        work = take(membership)
        taken.append(len(membership._works))
        return work

    monkeypatch.setattr(Incoming, "arrived", late_state)
    monkeypatch.setattr(SiteMembership, "followed_work", counted)
    run = islands.train(tmp_path, STEPS, [Death(0, 2, 5, returns=True)])
    assert 2 < run.returned_at[0] < STEPS
    assert max(taken) == 0


class OneSumArrived:
    """The membership of a site that returns, and is admitted after the sums of one step."""

    def __init__(self):
        self.works = [(ApplySums(7, 1, 0), jnp.ones((256, 256)))]

    def be_admitted(self):
        pass

    def end_return(self):
        return not self.works

    def followed_work(self):
        return self.works.pop()


def test_devices_have_done_a_step_before_a_site_that_returns_asks_for_the_next():
    @jax.jit
    def update(state, sums):
        """Take a tenth of a second or more."""
        return jax.lax.fori_loop(0, 300, lambda _, product: product @ sums, state)

    zeros = jnp.zeros((256, 256))
    made, was_ready = [], []

    def update_later(state, sums):
        made.append(update(state, sums))
        assert not made[-1].is_ready()
        return made[-1], None

    catch_up(
        OneSumArrived(),
        types.SimpleNamespace(update=update_later),
        zeros,
        lambda step: was_ready.append((step, made[0].is_ready())),
    )
    assert was_ready == [(7, True)]


def test_a_step_after_a_rehearsal_finds_its_programs_at_once(islands):
    island = islands.islands[0]
    built = island.walk
    walk = Walk(built.actions, built.windows, built.programs, mute(0, NAMES))
    island.state = jax.tree.map(jnp.copy, islands.first_states[0])
    inputs, signals = island.inputs(islands.batches[0]), island.signals()
    state = rehearse(walk, island.state, signals, inputs)

    sums = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), walk.programs.sums
    )
    island.state, _ = walk.programs.update(state, sums)
    inputs = island.inputs(islands.batches[0])
    with count_pjit_cpp_cache_miss() as looked_up:
        walk.step(island.state, signals, [inputs])
        assert looked_up() == 0
