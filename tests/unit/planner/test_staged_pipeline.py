"""The costs of a model's chunks and hops on a topology, against counts by hand."""

import dataclasses

import pytest

from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.models.flops import model_flops
from geojax.pipeline.schedule import Placement
from geojax.pipeline.simulation.model_costs import layers_by_operations
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.staged_pipeline import StagedPipeline
from geojax.settings import validate
from geojax.topology import Topology

MODEL = ModelConfig.load("llama2-70b")
PEAK = 989e12
EXACT = Calibration(matmul_efficiency={}, other_matmul_efficiency=1.0, between_hosts=1.0)


def topology(accelerators=("h100-sxm", "h100-sxm"), hosts=8, links=True):
    sites = [
        {
            "name": name,
            "hosts": hosts,
            "accelerators_per_host": 8,
            "accelerator": accelerator,
            "inside_host": {"round_trip_seconds": "2us", "bytes_per_second": "450GB/s"},
            "between_hosts": {"round_trip_seconds": "10us", "bytes_per_second": "50GB/s"},
        }
        for name, accelerator in zip(("east", "west", "north"), accelerators, strict=False)
    ]
    link = {"round_trip_seconds": "20ms", "bytes_per_second": "100GB/s"}
    neighbors = [("east", "west"), ("west", "north")][: len(accelerators) - 1]
    joined = [{"sites": list(pair)} | link for pair in neighbors] if links else []
    return validate(Topology, {"name": "test", "sites": sites, "links": joined}, "test")


def staged(
    sites=2,
    stages=2,
    model=MODEL,
    joined=None,
    calibration=EXACT,
    stage_seconds=None,
    sequences=1,
    sequence_length=4096,
    **sections,
):
    mesh = {"dc": sites, "stage": stages, "data": 2, "tensor": 8} | sections.pop("mesh", {})
    layout = LayoutCandidate.made(
        sequence_length=sequence_length,
        microbatches=8,
        microbatch_size=sequences,
        mesh=mesh,
        dc={"role": "stage"},
        **sections,
    )
    return StagedPipeline(model, layout, joined or topology(), calibration, stage_seconds)


@pytest.mark.parametrize("model", ["llama2-70b", "gpt3-175b", "mixtral-8x7b"])
def test_all_chunks_together_take_as_long_in_any_placement(model):
    config = ModelConfig.load(model)
    pipeline = staged(model=config, sequence_length=2048)

    def total(placement):
        costs = pipeline.costs(placement)
        return sum(map(sum, (costs.forward, costs.backward, costs.weight)))

    assert total(Placement.linear(4)) > model_flops(config, 2048) * 2048 / 8 / PEAK
    assert total(Placement.vee(4)) == pytest.approx(total(Placement.linear(4)))


def test_a_share_of_the_peak_is_that_of_the_products():
    half = dataclasses.replace(EXACT, other_matmul_efficiency=0.5)
    placement = Placement.linear(4)
    one, two = (staged(calibration=each).costs(placement) for each in (EXACT, half))
    assert 1.5 < two.weight[1] / one.weight[1] <= 2.0


def test_the_head_takes_the_place_of_layers_on_the_last_stage():
    config = ModelConfig.load("llama3-8b")  # a vocabulary of 128256 weighs as much as 2.4 layers
    layers = staged(model=config).layers(Placement.linear(4))
    assert sum(layers) == 32
    assert layers[3] < min(layers[:3])
    assert layers_by_operations(config, 4096, 4) == (8, 9, 9, 6)
    assert layers_by_operations(config, 4096, 4, "full") == (8, 8, 9, 7)  # layers weigh more


def test_given_layers_are_those_of_placements_with_so_many_chunks():
    pipeline = staged(pipeline={"layers": (10, 20, 30, 20)})
    assert pipeline.layers(Placement.linear(4)) == (10, 20, 30, 20)
    forward = pipeline.costs(Placement.linear(4)).forward
    assert forward[2] == pytest.approx(1.5 * forward[1], rel=0.01)
    assert pipeline.layers(Placement.vee(4)) == (10,) * 8


def test_a_site_of_slower_accelerators_gets_fewer_layers():
    pipeline = staged(joined=topology(("h100-sxm", "a100-sxm-80gb")))
    placement = Placement.linear(4)
    layers = pipeline.layers(placement)
    assert sum(layers) == 80
    assert layers[0] > 2 * layers[3]
    costs = pipeline.costs(placement)
    stages = costs.work
    assert max(stages) < 1.1 * min(stages)


def test_hops_inside_a_site_and_across():
    near, cut, far = staged().costs(Placement.linear(4)).hops
    activations = 4096 * 8192 * 2
    assert near == far
    assert near.link is None
    assert near.latency == pytest.approx(5e-6 + activations / 50e9, rel=0.2)  # another host
    assert (cut.link, cut.latency) == ("east-west", 10e-3)
    assert cut.transfer == pytest.approx(16 * activations / 100e9)  # all share the link


def test_sequence_parallelism_sends_each_activation_once_and_context_none_twice():
    shared = staged(parallelism={"sequence": True})
    assert shared.hop_bytes == staged().hop_bytes / 8
    cut_in_two = staged(mesh={"tensor": 4, "context": 2})
    assert cut_in_two.hop_bytes == staged().hop_bytes / 2


def test_chunks_of_one_stage_need_no_message_and_links_are_named_alike_both_ways():
    v_shape = Placement.vee(4)
    hops = staged().costs(v_shape).hops
    assert [hop.link for hop in hops] == [None, "east-west", None, None, None, "east-west", None]
    assert hops[3].seconds == 0


def test_three_sites_in_a_row():
    pipeline = staged(sites=3, stages=1, joined=topology(("h100-sxm",) * 3))
    assert pipeline.site_of == ("east", "west", "north")
    assert [hop.link for hop in pipeline.costs(Placement.linear(3)).hops] == [
        "east-west",
        "west-north",
    ]


def test_a_measured_stage_sets_the_scale():
    simulated = staged(joined=topology(("simulated", "simulated")), stage_seconds=0.3)
    by_peak = staged()
    placement = Placement.linear(4)
    costs, other = simulated.costs(placement), by_peak.costs(placement)
    stages = costs.work
    assert max(stages) == pytest.approx(0.3)
    assert costs.hops == other.hops
    halves = simulated.costs(Placement.interleaved((2, 2), 2))
    assert sum(halves.forward) == pytest.approx(sum(costs.forward))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": {"data": 5}},
            "2 stages of 40 devices each need 80 accelerators, and site 'east'",
        ),
        ({"joined": topology(("h100-sxm", "simulated"))}, "peak of accelerator 'simulated'"),
        ({"joined": topology(links=False)}, "says nothing of the link between 'east' and 'west'"),
        (
            {"model": MODEL.model_copy(update={"num_hidden_layers": 3})},
            "3 layers cannot be cut into 4 stages",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as refusal:
        staged(**changes).costs(Placement.linear(4))
    assert "\n" not in str(refusal.value)


def test_a_longer_microbatch_takes_longer_in_proportion():
    one, two = staged().costs(Placement.linear(4)), staged(sequences=2).costs(Placement.linear(4))
    assert two.forward == pytest.approx([2 * each for each in one.forward], rel=0.1)
