"""Plans for links that change: agreed on, made, and taken by a run that goes on."""

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from support.resolving import compiled_run
from support.small_models import make_batch

from geojax import make_mesh
from geojax.config.run_config import RunConfig
from geojax.islands.exchange import Exchange
from geojax.planner.resolve.changed_links import planned_for
from geojax.planner.resolve.resolve import resolve
from geojax.topology import Topology
from geojax.train.adapt.replan import Replanning
from geojax.train.links.agreement import AgreementOfIslands, AgreementOfOneProgram
from geojax.train.links.deviations import LinkFigures, LinkRequest, with_links
from geojax.train.links.link_meter import LinkMeter
from geojax.transport import loopback

ROWS, NAMES = 8, ("east", "west")
TRIP, RATE = 0.021, 1.25e9
LARGE = {
    "run_directory": "run",
    "steps": 10,
    "topology": "two-h100-sites",
    "model": "llama3-70b",
    "remat": "full",
    "parallelism": {"sequence": True},
    "data": {"sources": [{"name": "text", "prepared": "text"}]},
    "batch": {"global_batch_size": 1536, "sequence_length": 8192, "microbatches": 4},
    "mesh": {"dc": 2, "data": 192, "tensor": 8},
}
ALLOWED = {"replan": True, "compression": True}


def slower(topology, factor):
    first, second = NAMES
    rate = topology.link(first, second).bytes_per_second / factor
    return with_links(topology, {pair: LinkFigures(None, rate) for pair in (NAMES, NAMES[::-1])})


def test_gradients_are_compressed_for_a_slower_link_only_where_that_is_allowed():
    topology = Topology.load("two-h100-sites")
    chosen = {}
    for factor in (1, 500):
        for name, adapt in (("allowed", ALLOWED), ("not", {"replan": True})):
            config = RunConfig.model_validate(LARGE | {"adapt": adapt})
            planned = planned_for(config, slower(topology, factor))
            chosen[name, factor] = planned.communication.gradient_compression
    assert chosen == {
        ("allowed", 1): "none",
        ("not", 1): "none",
        ("allowed", 500): "int8",
        ("not", 500): "none",
    }


def test_counts_of_experts_tokens_are_never_sent_in_int8():
    model = {"preset": "deepseekmoe-16b", "use_router_bias": True}
    batch = LARGE["batch"] | {"sequence_length": 4096}
    config = RunConfig.model_validate(LARGE | {"model": model, "batch": batch, "adapt": ALLOWED})
    planned = planned_for(config, slower(Topology.load("two-h100-sites"), 500))
    assert planned.communication.gradient_compression == "bf16"


def test_buckets_and_hops_are_planned_for_the_links_of_the_config():
    topology = slower(Topology.load("two-h100-sites"), 5)
    config = planned_for(RunConfig.model_validate(LARGE), topology)
    assert config.load_topology().links == topology.links
    assert config.load_topology().sites == Topology.load("two-h100-sites").sites


@pytest.fixture
def small(tmp_path):
    """The config of a run of two simulated sites."""
    site = {
        "hosts": 1,
        "accelerators_per_host": 2,
        "accelerator": {"name": "core", "peak_flops_per_second": {"float64": 1e11}},
    }
    link = {"sites": NAMES, "round_trip_seconds": TRIP, "bytes_per_second": RATE}
    described = {"sites": [{"name": name, **site} for name in NAMES]}
    described["links"] = [link | {"sites": list(NAMES)}]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(described))
    content = {
        "run_directory": str(tmp_path / "run"),
        "steps": 10,
        "topology": str(tmp_path / "two.yaml"),
        "mesh": {"dc": 2},
        "model": {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "vocab_size": 61,
            "max_position_embeddings": 32,
        },
        "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
        "batch": {"global_batch_size": ROWS, "sequence_length": 32},
        "precision": "fp64",
        "adapt": ALLOWED,
    }
    jax.config.update("jax_enable_x64", True)
    yield RunConfig.model_validate(content)
    jax.config.update("jax_enable_x64", False)


def mesh_of(config):
    return make_mesh(devices=jax.devices()[: config.mesh.devices], **config.mesh.model_dump())


class AgreedLinks:
    """An agreement whose answers are given."""

    def __init__(self, *answers):
        self.answers, self.met = list(answers), 0

    def changed(self, request, timeout_seconds):
        return self.answers.pop(0)

    def meet(self, timeout_seconds):
        self.met += 1


def fallen(config, factor):
    return {
        pair: LinkFigures(TRIP, config.load_topology().link(*pair).bytes_per_second / factor)
        for pair in (NAMES, NAMES[::-1])
    }


def test_a_run_planned_anew_goes_on_with_the_same_losses(small):
    batches = [make_batch(small.model, seed, ROWS) for seed in range(4)]
    requests = {"stop": False, "save": False}
    run = compiled_run(small, mesh_of(small))

    def trained(run, state, batches):
        losses = []
        for batch in batches:
            state, metrics = run.step(state, batch, requests)
            losses.append(float(metrics["loss"]))
        return state, losses

    assert run.replanned(run.resolved) is None
    _, expected = trained(run, run.initial_state(), batches)
    state, first = trained(run, run.initial_state(), batches[:2])
    lines = []
    only_buckets = small.model_copy(
        update={"adapt": small.adapt.model_copy(update={"compression": False})}
    )
    for config, tolerance in ((only_buckets, 1e-12), (small, 1e-3)):
        links = AgreedLinks(None, fallen(small, 1), fallen(small, 100))
        topology, devices = config.load_topology(), jax.devices()[: config.mesh.devices]

        def anew_for(changed, step, config=config, devices=devices):
            return resolve(config, changed, devices)

        replanning = Replanning(topology, "east", links, anew_for, None, lines.append, 1.0)
        assert replanning.replanned(run, 2) is None
        assert lines == []
        assert replanning.replanned(run, 2) is None
        assert "the links are as planned: a straggler or slower kernels" in lines.pop()
        anew = replanning.replanned(run, 2)
        assert links.met == 1
        assert anew.plan.bucket_bytes < run.plan.bucket_bytes
        assert anew.step_program is not run.step_program
        assert lines[0] == (
            "step 2: planning anew: the link east-west is 100 Mbit/s at 21 ms, and was 10 Gbit/s "
            "at 21 ms"
        )
        compression = anew.resolved.layout.communication.gradient_compression
        assert f"gradient_compression {compression}" in lines[1]
        lines.clear()
        copied = jax.tree.map(jnp.copy, state)
        _, rest = trained(anew, anew.adopt(copied), batches[2:])
        np.testing.assert_allclose(first + rest, expected, rtol=tolerance)
    # Of so small a model round trips take most of the time, which int8 would not save.
    assert compression == "bf16"
    assert run.plan.wire_format != anew.plan.wire_format


def test_one_program_times_its_links_when_process_0_asks(small, monkeypatch):
    rates = {NAMES: 1e8}
    monkeypatch.setattr(LinkMeter, "rates", lambda meter: rates)
    links = AgreementOfOneProgram(mesh_of(small), NAMES, small.load_topology())
    assert links.changed(LinkRequest(), 1.0) is None
    slow = LinkRequest(unexplained=True)
    as_described = dict.fromkeys((NAMES, NAMES[::-1]), LinkFigures(None, RATE))
    assert links.changed(slow, 1.0) == as_described
    rates = {NAMES: 2e7}
    far = dataclasses.replace(LinkFigures(), round_trip_seconds=0.1)
    found = links.changed(LinkRequest({"west": far}), 1.0)
    for each in found.values():
        assert each == LinkFigures(0.1, pytest.approx(RATE / 5))
    rates = {NAMES: 0.9e8}
    assert links.changed(slow, 1.0) == as_described, "the link is itself again"


def test_a_link_meter_times_messages_of_all_devices(small):
    meter = LinkMeter(mesh_of(small), NAMES, small.load_topology())
    ((pair, rate),) = meter.rates().items()
    assert pair == NAMES
    assert rate > 0


def test_islands_agree_on_what_each_has_measured():
    figures = LinkFigures(0.03, 2e7)
    requests = [LinkRequest({"west": figures}), LinkRequest()]

    def of_site(transport, mesh):
        links = AgreementOfIslands(Exchange(transport, "links"), mesh, NAMES)
        return [
            links.changed(request, 1.0) for request in (requests[transport.site], LinkRequest())
        ]

    meshes = [make_mesh(devices=[device]) for device in jax.devices()[:2]]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first, second = threads.map(of_site, loopback(2), meshes)
    assert first == second
    assert first[1] is None
    (((sender, receiver), found),) = first[0].items()
    assert (sender, receiver) == NAMES
    assert found.round_trip_seconds == pytest.approx(0.03)
    assert found.bytes_per_second == pytest.approx(2e7)


def test_compression_without_replan_is_refused():
    with pytest.raises(ValueError, match="compression requires replan=true"):
        RunConfig.model_validate(LARGE | {"adapt": {"compression": True}})
