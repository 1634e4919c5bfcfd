"""Sites that go on without one that is lost, at any point of a step, with the same bits."""

from collections import Counter

import pytest
from support.mortal_islands import NAMES, Death, assert_same

from geojax.islands import walk

STEPS = 3
QUICK = (0, 4, 8, 12)
OPERATIONS = 13
"""A site dies before each of six offers, after it has taken each of six messages, or after the
update."""


@pytest.fixture(scope="module")
def undisturbed(islands, tmp_path_factory):
    return islands.train(tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(number, marks=[] if number in QUICK else [pytest.mark.slow])
        for number in range(OPERATIONS)
    ],
)
@pytest.mark.parametrize("site", range(len(NAMES)), ids=NAMES)
def test_a_site_that_dies_anywhere_in_a_step_changes_no_bit(
    site, operation, islands, undisturbed, tmp_path
):
    run = islands.train(tmp_path, STEPS, [Death(site, 2, operation)])
    assert set(run.states) == set(range(len(NAMES))) - {site}
    assert_same(run, undisturbed)
    for other in run.states:
        (line,) = (line for line in run.lines[other] if "is lost" in line)
        assert f"site {NAMES[site]} is lost (" in line
        assert "(membership 2 in record)" in line


def test_the_last_site_goes_on_alone(islands, undisturbed, tmp_path):
    run = islands.train(tmp_path, STEPS, [Death(0, 2, 3), Death(2, 3, 8)])
    assert set(run.states) == {1}
    assert_same(run, undisturbed)
    assert "mid computes the shares of mid and east and west" in run.lines[1][-1]


def test_the_share_of_a_lost_site_is_left_out_where_the_batch_shrinks(islands, tmp_path_factory):
    west = NAMES.index("west")
    without = islands.train(tmp_path_factory.mktemp("without"), STEPS, unseen=(west, 2))
    death = Death(west, 2, 0)
    run = islands.train(tmp_path_factory.mktemp("shrunk"), STEPS, [death], keeps_batch=False)
    assert set(run.states) == {0, 1}
    assert_same(run, without)
    for lines in (run.lines[0], run.lines[1]):
        assert "mid computes the share of mid, nobody computes the share of west" in lines[-1]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(number, marks=[] if number in (4, 12) else [pytest.mark.slow])
        for number in range(OPERATIONS)
    ],
)
@pytest.mark.parametrize("processes", [2, (1, 2, 1)])
@pytest.mark.parametrize("process", range(2))
def test_a_site_of_two_processes_decides_as_one(
    process, processes, operation, islands, undisturbed, tmp_path
):
    deaths = [Death(1, 2, operation, process=process)]
    run = islands.train(tmp_path, STEPS, deaths, processes=processes)
    assert set(run.states) == {0, 2}
    assert_same(run, undisturbed)
    run.assert_processes_agree()
    for other in run.states:
        assert sum("site mid is lost (" in line for line in run.lines[other]) == 1


def test_a_survivor_computes_again_only_what_is_lost(islands, undisturbed, tmp_path, monkeypatch):
    passes = Counter()
    forward = walk._Step._forward

    def counted(step, action):
        passes[step._transport.site, step._place.step, step._share_of(action)] += 1
        forward(step, action)

    monkeypatch.setattr(walk._Step, "_forward", counted)
    run = islands.train(tmp_path, STEPS, [Death(2, 2, 0)])
    assert_same(run, undisturbed)
    assert all(passes[site, 2, site] == passes[site, 1, site] > 0 for site in run.states)
    assert passes[0, 2, 2] + passes[1, 2, 2] == passes[2, 1, 2]
