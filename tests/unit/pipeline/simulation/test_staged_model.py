"""The costs of a model's chunks and hops on a topology, against counts by hand."""

import math

import pytest

from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.models.flops import model_flops
from geojax.models.parallel.parallelism import Parallelism
from geojax.pipeline.schedule import Placement
from geojax.pipeline.simulation.model_costs import layers_by_operations
from geojax.pipeline.simulation.staged_model import StagedModel
from geojax.settings import validate
from geojax.topology import Topology

MODEL = ModelConfig.load("llama2-70b")
PEAK = 989e12


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


def staged(**changes):
    settings = {
        "model": MODEL,
        "topology": topology(),
        "stages_per_site": 2,
        "sequences": 1,
        "sequence_length": 4096,
        "data": 2,
        "parallelism": Parallelism(tensor=8),
    }
    return StagedModel(**(settings | changes))


@pytest.mark.parametrize("model", ["llama2-70b", "gpt3-175b", "mixtral-8x7b"])
def test_all_chunks_together_take_the_model_s_operations(model):
    config = ModelConfig.load(model)
    pipeline = staged(model=config, sequence_length=2048, efficiency=0.4)
    costs = pipeline.costs(Placement.linear(4))
    total = sum(map(sum, (costs.forward, costs.backward, costs.weight)))
    expected = model_flops(config, 2048) * 2048 / 8 / (0.4 * PEAK)
    embedding = 5 * 2048 * config.hidden_size * 2 / 3.35e12
    assert total == pytest.approx(expected + embedding, rel=1e-12)


def test_a_layer_s_three_parts():
    costs = staged().costs(Placement.linear(4))
    kernels = (2 * 8192**2 + 2 * 8192 * 1024) + 3 * 8192 * 28672
    attention = 4 * 64 * 128 * 4096
    layers = staged().layers(Placement.linear(4))[1]
    unit = layers * 4096 / 8 / (0.5 * PEAK)
    assert costs.forward[1] == pytest.approx(unit * (2 * kernels + attention))
    assert costs.backward[1] == pytest.approx(unit * (2 * kernels + 2 * attention))
    assert costs.weight[1] == pytest.approx(unit * 2 * kernels)
    for remat, again in (("selective", attention), ("full", 2 * kernels + attention)):
        other = staged(remat=remat).costs(Placement.linear(4))
        assert other.backward[1] == pytest.approx(costs.backward[1] + unit * again)
        assert (other.forward, other.weight) == (costs.forward, costs.weight)


def test_the_head_takes_the_place_of_layers_on_the_last_stage():
    config = ModelConfig.load("llama3-8b")  # a vocabulary of 128256 weighs as much as 2.4 layers
    pipeline = staged(model=config)
    assert pipeline.layers(Placement.linear(4)) == (8, 9, 9, 6)
    assert layers_by_operations(config, 4096, 4) == (8, 9, 9, 6)
    assert layers_by_operations(config, 4096, 4, "full") == (8, 8, 9, 7)  # layers weigh more
    costs = pipeline.costs(Placement.linear(4))
    head = 2 * 4096 * 128256 * 4096 / 8 / (0.5 * PEAK)
    assert costs.weight[3] == pytest.approx(costs.weight[2] * 6 / 9 + head)


def test_given_layers_are_those_of_placements_with_so_many_chunks():
    pipeline = staged(given_layers=(10, 20, 30, 20))
    assert pipeline.layers(Placement.linear(4)) == (10, 20, 30, 20)
    forward = pipeline.costs(Placement.linear(4)).forward
    assert forward[2] == pytest.approx(1.5 * forward[1])
    assert pipeline.layers(Placement.vee(4)) == (10,) * 8


def test_a_site_of_slower_accelerators_gets_fewer_layers():
    pipeline = staged(topology=topology(("h100-sxm", "a100-sxm-80gb")))
    placement = Placement.linear(4)
    layers = pipeline.layers(placement)
    assert sum(layers) == 80
    assert layers[0] > 2.5 * layers[3]
    costs = pipeline.costs(placement)
    stages = [sum(parts) for parts in zip(costs.forward, costs.backward, costs.weight, strict=True)]
    assert max(stages) < 1.1 * min(stages)


def test_hops_inside_a_site_and_across():
    near, cut, far = staged().costs(Placement.linear(4)).hops
    activations = 4096 * 8192 * 2
    assert near == far
    assert (near.link, near.latency) == (None, 5e-6)  # 16 devices a stage: another host
    assert near.transfer == pytest.approx(activations / 50e9)
    assert (cut.link, cut.latency) == ("east-west", 10e-3)
    assert cut.transfer == pytest.approx(16 * activations / 100e9)  # all share the link


def test_sequence_parallelism_sends_each_activation_once_and_context_none_twice():
    shared = staged(parallelism=Parallelism(tensor=8, sequence=True))
    assert shared.hop_bytes == staged().hop_bytes / 8
    cut_in_two = staged(parallelism=Parallelism(tensor=4, context=2))
    assert cut_in_two.hop_bytes == staged().hop_bytes / 2
    near = shared.costs(Placement.linear(4)).hops[0]
    assert near.transfer == pytest.approx(4096 * 8192 * 2 / 8 / 50e9)


def test_small_stages_share_a_host():
    hops = staged(data=1, parallelism=Parallelism(tensor=2), stages_per_site=5).costs(
        Placement.linear(10)
    )
    latencies = [hop.latency for hop in hops.hops[:4]]
    assert latencies == [1e-6, 1e-6, 1e-6, 5e-6]  # four stages in the first host
    assert [hop.link for hop in hops.hops].index("east-west") == 4


def test_chunks_of_one_stage_need_no_message_and_links_are_named_alike_both_ways():
    v_shape = Placement.vee(4)
    hops = staged().costs(v_shape).hops
    assert [hop.link for hop in hops] == [None, "east-west", None, None, None, "east-west", None]
    assert hops[3].seconds == 0


def test_three_sites_in_a_row():
    pipeline = staged(topology=topology(("h100-sxm",) * 3), stages_per_site=1)
    assert pipeline.site_of == ("east", "west", "north")
    assert [hop.link for hop in pipeline.costs(Placement.linear(3)).hops] == [
        "east-west",
        "west-north",
    ]


def test_a_measured_stage_sets_the_scale():
    simulated = staged(topology=topology(("simulated", "simulated")), stage_seconds=0.3)
    by_peak = staged()
    placement = Placement.linear(4)
    costs, other = simulated.costs(placement), by_peak.costs(placement)
    stages = [sum(parts) for parts in zip(costs.forward, costs.backward, costs.weight, strict=True)]
    assert max(stages) == pytest.approx(0.3)
    assert costs.hops == other.hops
    assert costs.forward[1] / costs.weight[1] == pytest.approx(other.forward[1] / other.weight[1])
    halves = simulated.costs(Placement.interleaved((2, 2), 2))
    assert sum(halves.forward) == pytest.approx(sum(costs.forward))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": 5}, "2 stages of 40 devices each need 80 accelerators, and site 'east'"),
        ({"topology": topology(("h100-sxm", "simulated"))}, "peak of accelerator 'simulated'"),
        ({"topology": topology(links=False)}, "says nothing of the link between 'east' and 'west'"),
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
    assert all(math.isclose(b, 2 * a) for a, b in zip(one.forward, two.forward, strict=True))
