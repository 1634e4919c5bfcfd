import pytest

from geojax.accelerators import Accelerator, accelerator_named
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.models.flops import model_flops
from geojax.pipeline.schedule import Placement
from geojax.pipeline.simulation.costs import Costs, Hop
from geojax.pipeline.simulation.simulator import iteration_seconds
from geojax.pipeline.simulation.stage_times import PieceTimes, SiteTimes, StageTimes
from geojax.planner.cost import pipeline
from geojax.planner.cost.calibration import MEASURED, Calibration
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layer import LayerTimes
from geojax.planner.cost.layout import LayoutCandidate, SiteShare
from geojax.planner.cost.predict import predict
from geojax.topology import Topology

LLAMA = ModelConfig.load("llama3-70b")
MIXTRAL = ModelConfig.load("mixtral-8x7b")


def two_sites(gbit=3200, trip="21ms", sites=2):
    names = [f"site{index}" for index in range(sites)]
    return Topology.model_validate(
        {
            "sites": [
                {
                    "name": name,
                    "hosts": 32,
                    "accelerators_per_host": 8,
                    "accelerator": "h100-sxm",
                }
                for name in names
            ],
            "links": [
                {
                    "sites": [first, second],
                    "round_trip_seconds": trip,
                    "bytes_per_second": f"{gbit}Gbit/s",
                }
                for index, first in enumerate(names)
                for second in names[index + 1 :]
            ],
        }
    )


DATA = LayoutCandidate.made(
    sequence_length=4096,
    microbatches=8,
    mesh={"dc": 2, "data": 32, "tensor": 8},
    parallelism={"sequence": True},
    zero={"stage": 1},
)
STAGE = LayoutCandidate.made(
    sequence_length=4096,
    microbatches=32,
    mesh={"dc": 2, "stage": 4, "data": 8, "tensor": 8},
    dc={"role": "stage"},
    pipeline={"schedule": "geopipe"},
)
LAYOUTS = {
    "data": DATA,
    "data over islands": DATA.changed(dc={"join": "islands"}),
    "data in int8": DATA.changed(communication={"gradient_compression": "int8"}),
    "data with overlap": DATA.changed(
        communication={"overlap_grad_reduce": True, "bucket_layers": 4}
    ),
    "data in a pipeline": DATA.changed(
        mesh={"stage": 4, "data": 8}, pipeline={"virtual_stages": 2, "schedule": "interleaved"}
    ).with_microbatches(8, 1),
    "weights over sites": DATA.changed(zero={"across_sites": True}),
    "zero 3": DATA.changed(zero={"stage": 3}).with_microbatches(1, 1),
    "context": DATA.changed(mesh={"data": 16, "context": 2}, remat="selective").with_microbatches(
        8, 1
    ),
    "fp8": DATA.changed(precision="fp8-current", remat="full"),
    "stages": STAGE,
    "stages over islands": STAGE.changed(dc={"join": "islands"}, pipeline={"schedule": "1f1b"}),
}


def step(layout, topology=None, model=LLAMA, **changes):
    changes.setdefault("calibration", Calibration())
    return predict(model, layout, topology or two_sites(), **changes)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_step_is_the_sum_of_its_terms(layout):
    made = step(layout)
    assert made.step_seconds == pytest.approx(sum(term.exposed_seconds for term in made.terms))
    assert all(0 <= term.exposed_seconds <= term.seconds * (1 + 1e-9) for term in made.terms)
    assert all(term.source for term in made.terms)
    assert 0.1 < made.model_flops_utilization < 0.6
    assert {(use.source, use.target) for use in made.links} == {
        ("site0", "site1"),
        ("site1", "site0"),
    }
    assert made.relative_error is not None
    assert made.not_modelled


def test_the_weights_of_chunks_that_come_late_are_hidden():
    layout = LAYOUTS["data in a pipeline"]
    made = [
        step(layout.changed(communication={"overlap_param_gather": late}))
        for late in (False, True, "auto")
    ]
    at_once, late, auto = (
        next(term for term in each.terms if term.name == "weights in the site") for each in made
    )
    assert late == auto
    assert at_once.exposed_seconds == at_once.seconds == late.seconds
    assert late.bytes == at_once.bytes
    assert late.exposed_seconds < 0.65 * late.seconds


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_better_link_is_never_slower(layout):
    near, far = (step(layout, two_sites(trip=trip)).step_seconds for trip in ("1ms", "80ms"))
    wide, thin = (step(layout, two_sites(gbit=gbit)).step_seconds for gbit in (3200, 100))
    assert near <= far
    assert wide < thin


def test_stages_send_the_residual_stream():
    made = step(LAYOUTS["stages over islands"])
    stream = 4096 * LLAMA.hidden_size * 2  # of one sequence, whole on every tensor rank
    assert made.links[0].bytes == 8 * 8 * 32 * stream
    assert made.links[0].peak_bytes_per_second == 400e9


def test_islands_hide_the_sums_behind_the_backward_of_all_microbatches_that_fit():
    joined, apart, tight = (
        step(LAYOUTS[name].changed(remat=remat)).term("gradients between sites")
        for name, remat in (
            ("data in a pipeline", "full"),
            ("data over islands", "full"),
            ("data over islands", "none"),
        )
    )
    assert apart.exposed_seconds < 0.5 * joined.seconds
    assert apart.exposed_seconds >= 0.0105, "half a round trip is left in any case"
    assert tight.exposed_seconds > apart.exposed_seconds, "fewer microbatches are held at once"


def test_compression_takes_its_share_of_the_link():
    none, int8 = (
        step(LAYOUTS[name]).term("gradients between sites").bytes
        for name in ("data", "data in int8")
    )
    assert int8 == pytest.approx(none / 4, rel=0.05)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "branch_free", "geopipe"])
@pytest.mark.parametrize("lock_step", [True, False])
@pytest.mark.parametrize("role", ["data", "stage"])
def test_many_microbatches_are_extrapolated_exactly(monkeypatch, schedule, lock_step, role):
    virtual = 2 if schedule == "interleaved" else 1
    layout = LayoutCandidate.made(
        sequence_length=4096,
        microbatches=48,
        mesh={"dc": 2, "stage": 4},
        dc={"role": role},
        pipeline={"virtual_stages": virtual, "schedule": schedule},
    )
    placement = Placement.interleaved(layout.stages_per_site, virtual)
    hops = [Hop(0.05)] * (placement.chunks - 1)
    if role == "stage":
        hops[len(hops) // 2] = Hop(1.7, 0.3, "east-west")
    chunks = (1.0,) * placement.chunks
    costs = Costs(chunks, (1.5,) * len(chunks), (0.5,) * len(chunks), tuple(hops))
    few = pipeline.pipeline_time(layout, placement, costs, lock_step=lock_step).seconds
    monkeypatch.setattr(pipeline, "_few", lambda *_: (48, 48))
    all_of = pipeline.pipeline_time(layout, placement, costs, lock_step=lock_step).seconds
    assert few == pytest.approx(all_of, rel=0.005 if role == "stage" else 1e-9)


def test_a_split_backward_is_not_free():
    split = step(STAGE.changed(pipeline={"schedule": "zero_bubble_h1", "memory_limit": None}))
    whole = step(STAGE)
    backward = 2 * split.term("matrix products").seconds / 3
    assert split.term("split backward").exposed_seconds > 0.08 * backward
    assert not any(term.name == "split backward" for term in whole.terms)


def test_islands_run_event_by_event():
    apart = LAYOUTS["stages over islands"]
    joined = apart.changed(dc={"join": "one_program"})
    assert step(apart).step_seconds < step(joined).step_seconds


def test_the_slower_site_sets_the_time_of_replicas():
    topology = two_sites()
    older = topology.sites[1].model_copy(update={"accelerator": accelerator_named("a100-sxm-80gb")})
    mixed = topology.model_copy(update={"sites": (topology.sites[0], older)})
    even = step(DATA, mixed)
    shares = (SiteShare(1, 32, 384), SiteShare(1, 32, 128))
    in_proportion = step(DATA.with_shares(shares), mixed)
    assert in_proportion.step_seconds < 0.7 * even.step_seconds
    assert step(DATA).step_seconds < in_proportion.step_seconds


def test_sites_may_hold_unequal_numbers_of_stages():
    shares = tuple(SiteShare(stages, 8, 256) for stages in (5, 3))
    uneven = STAGE.with_shares(shares)
    assert uneven.devices_per_site == (5 * 64, 3 * 64)
    for join in ("one_program", "islands"):
        layout = uneven.changed(dc={"join": join})
        alike = layout.with_shares(None).changed(pipeline={"head": "last_stage"})
        even = step(alike).step_seconds
        assert step(layout).step_seconds == pytest.approx(even, rel=0.01)


def test_experts_are_few_products_and_all_to_alls():
    layout = LayoutCandidate.made(
        sequence_length=4096, microbatches=4, mesh={"dc": 2, "data": 32, "expert": 8}
    )
    made = step(layout, model=MIXTRAL)
    dense = step(layout.changed(mesh={"data": 256, "expert": 1}), model=MIXTRAL)
    assert made.term("expert all-to-alls").network == "inside_host"
    assert made.relative_error is None, "no published step with experts is compared"
    assert made.term("matrix products").seconds < dense.term("matrix products").seconds


def test_measured_times_take_the_place_of_computed_ones():
    times = PieceTimes(forward=0.01, backward=0.015, weight=0.01)
    measured = StageTimes(
        model=LLAMA,
        sequences=1,
        sequence_length=4096,
        dtype="bfloat16",
        remat="none",
        parallelism=DATA.model_parallelism,
        sites=(SiteTimes(name="site0", layer=times, embedding=times, head=times),),
    )
    made = step(DATA, calibration=Calibration(stage_times=measured))
    assert made.term("layers (measured)").seconds == pytest.approx(8 * 80 * 0.035)
    with pytest.raises(UserError, match="measured for remat=none, not full"):
        step(DATA.changed(remat="full"), calibration=Calibration(stage_times=measured))


def test_measured_rates_are_reached_in_full():
    slow = {"name": "mine", "peak_flops_per_second": {"bfloat16": 1e12}}
    sites = [
        site.model_copy(update={"accelerator": Accelerator.model_validate(slow)})
        for site in two_sites().sites
    ]
    mine = two_sites().model_copy(update={"sites": tuple(sites)})
    slower, faster = (
        step(DATA, mine, calibration=calibration).term("matrix products").seconds
        for calibration in (Calibration(), MEASURED)
    )
    assert faster == pytest.approx(Calibration().other_matmul_efficiency * slower, rel=0.01)


def test_products_have_the_operations_that_mfu_counts():
    for model in (LLAMA, MIXTRAL, ModelConfig.load("nemotron4-340b")):
        times = LayerTimes(
            model,
            LayoutCandidate.made(sequence_length=4096),
            two_sites().sites[0],
            Calibration(),
            GEOJAX,
        )
        of_layer = sum(
            2 * each.count * each.rows * each.columns * each.inner for each in times.products()
        )
        attention = 4 * model.num_attention_heads * model.head_dim * 4096 * 4096
        head = 2 * 4096 * model.hidden_size * model.vocab_size
        counted = 3 * (model.num_hidden_layers * (of_layer + attention) + head)
        assert counted == pytest.approx(4096 * model_flops(model, 4096), rel=1e-12)


def test_a_link_that_is_not_described_is_named():
    with pytest.raises(UserError, match="does not describe the links"):
        step(DATA, two_sites().model_copy(update={"links": ()}))


def test_a_layout_knows_its_devices_and_its_batch():
    assert DATA.devices == STAGE.devices == 512
    assert DATA.batch.global_batch_size == 2 * 32 * 8
    assert STAGE.batch.global_batch_size == 8 * 32
    assert STAGE.stages_per_site == (4, 4)


def test_a_simulated_pipeline_is_as_long_as_its_simulation():
    placement = Placement.linear(8)
    costs = Costs.uniform(8, 1.0, 2.0)
    one_site = STAGE.changed(mesh={"dc": 1, "stage": 8}, pipeline={"schedule": "1f1b"})
    layout = one_site.with_microbatches(8, 1)
    request = pipeline.EventRequest((8,), 8, costs, 8, 1)
    seconds = iteration_seconds(pipeline.ORDERS["1f1b"].by_events(request), costs)
    made = pipeline.pipeline_time(layout, placement, costs, lock_step=False)
    assert made == (seconds, seconds, 0.0)
    assert seconds == (8 + 7) * 3.0


def test_a_window_takes_its_share_of_attention():
    """A quarter of the sequence leaves 1 - (3/4)^2 of the causal scores, in half of the layers."""
    whole = step(DATA).term("attention").seconds
    half = ("sliding_attention", "full_attention")
    windowed = LLAMA.replace(sliding_window=1024, layer_types=half)
    assert step(DATA, model=windowed).term("attention").seconds == pytest.approx(
        whole * (0.5 * (1 - 0.75**2) + 0.5)
    )
    wide = LLAMA.replace(sliding_window=4096)
    assert step(DATA, model=wide).term("attention").seconds == whole
