"""NCCL's cliques of stages: two channels share all of them, or none."""

import itertools

import pytest

from geojax.pipeline import SCHEDULES, Kind, Placement, tick_table
from geojax.pipeline.execution.cliques import cliques_agree
from geojax.pipeline.execution.tick_program import Channel, TickProgram


def agree(*channels, stages):
    return cliques_agree([Channel(Kind.FORWARD, pairs, False) for pairs in channels], stages)


def test_channels_share_all_cliques_or_none():
    chain = ((0, 1), (1, 2), (2, 3))
    back = tuple((b, a) for a, b in chain)
    assert agree(chain, back, stages=4)
    assert agree(((0, 1), (2, 3)), ((1, 2),), stages=4), "inside sites, and over a cut"
    assert not agree(((0, 1), (1, 2)), ((1, 2),), stages=4), "stage 3 is alone in both"
    assert not agree(((0, 1),), ((0, 1), (2, 3)), stages=4), "stages 0 and 1 are alone in both"
    assert agree(((0, 1),), stages=4)
    assert agree(stages=4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_cut_divides_the_stages_in_one_way(name):
    stages = 4
    placement = {"zbv": Placement.vee(stages), "interleaved": Placement.interleaved((2, 2), 2)}.get(
        name, Placement.linear(stages)
    )
    of_chunks = placement.stage_of
    hops = [
        2 if {before, after} == {1, 2} else 1 for before, after in itertools.pairwise(of_chunks)
    ]
    program = TickProgram.of(
        tick_table(name, placement, 4, hops), branch_free=name == "branch_free"
    )
    assert any(channel.delayed for channel in program.channels)
    assert cliques_agree(program.channels, stages)
