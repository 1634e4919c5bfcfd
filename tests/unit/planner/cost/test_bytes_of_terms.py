"""The terms of the cost model that are bytes, beside what the step's trace counts.

Within 1% over `dc` and 2% over the axes of a site.
"""

import pytest

from geojax.config.run_config import RunConfig
from geojax.models import ModelConfig
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import predict
from geojax.planner.resolve.run_layout import layout_of_run, run_settings
from geojax.planner.resolve.traced_run import trace_on
from geojax.planner.step_traffic import evenly_sent
from geojax.planner.traffic.by_axes import add, no_bytes
from geojax.planner.traffic.gradients import predicted_gradient_bytes
from geojax.planner.traffic.weights import predicted_weight_bytes

SEQUENCE = 4096
DENSE = ModelConfig.load("llama3-8b").replace(num_hidden_layers=8)
MIXTURE = ModelConfig.load("mixtral-8x7b").replace(num_hidden_layers=4)
DATA = LayoutCandidate.made(
    sequence_length=SEQUENCE,
    microbatches=2,
    mesh={"dc": 2, "data": 4, "tensor": 2},
    parallelism={"sequence": True},
    zero={"stage": 1},
)
CONTEXT = DATA.changed(mesh={"data": 2, "context": 2}).with_microbatches(2, 1)
STAGES = DATA.changed(mesh={"stage": 2, "data": 2}, pipeline={"schedule": "1f1b"})
STAGES = STAGES.with_microbatches(8, 1)
THROUGH_SITES = STAGES.changed(dc={"role": "stage"}).with_microbatches(8, 1)


IN_SITE = {
    "zero 0": (DENSE, DATA.changed(zero={"stage": 0})),
    "zero 1": (DENSE, DATA),
    "zero 2": (DENSE, DATA.changed(zero={"stage": 2})),
    "zero 3": (DENSE, DATA.changed(zero={"stage": 3})),
    "zero 3, weights kept": (
        DENSE,
        DATA.changed(zero={"stage": 3, "reshard_after_forward": False}, remat="full"),
    ),
    "across sites": (DENSE, DATA.changed(zero={"across_sites": True})),
    "int8": (DENSE, DATA.changed(communication={"gradient_compression": "int8"})),
    "overlap": (
        DENSE,
        DATA.changed(communication={"overlap_grad_reduce": True, "bucket_layers": 2}),
    ),
    "tensor, full": (DENSE, DATA.changed(parallelism={"sequence": False}, remat="full")),
    "sequence, selective": (DENSE, DATA.changed(remat="selective")),
    "fp8": (DENSE, DATA.changed(precision="fp8-delayed", zero={"stage": 3})),
    "ring": (DENSE, CONTEXT.changed(parallelism={"context_method": "ring"})),
    "gathered keys": (DENSE, CONTEXT.changed(parallelism={"context_method": "all_gather"})),
    "ulysses": (DENSE, CONTEXT.changed(parallelism={"context_method": "ulysses"}, remat="full")),
    "experts": (
        MIXTURE,
        LayoutCandidate.made(
            sequence_length=SEQUENCE,
            microbatches=2,
            mesh={"dc": 2, "data": 2, "expert": 4},
            zero={"stage": 1},
        ),
    ),
    "experts, full": (
        MIXTURE,
        LayoutCandidate.made(
            sequence_length=SEQUENCE,
            microbatches=2,
            mesh={"dc": 2, "data": 2, "expert": 4},
            zero={"stage": 3},
            remat="full",
        ),
    ),
}
PIPELINES = {
    "in sites": STAGES.changed(pipeline={"virtual_stages": 2, "schedule": "interleaved"}),
    "branch_free": THROUGH_SITES.changed(pipeline={"schedule": "branch_free"}),
    "geopipe": THROUGH_SITES.changed(pipeline={"schedule": "geopipe"}),
    "geopipe, next tick": THROUGH_SITES.changed(pipeline={"schedule": "geopipe", "hop_ticks": 1}),
    "interleaved": THROUGH_SITES.changed(pipeline={"schedule": "interleaved", "virtual_stages": 2}),
    "1f1b": THROUGH_SITES,
    "1f1b, memory": THROUGH_SITES.changed(pipeline={"memory_limit": 8}),
    "zero_bubble_h1": THROUGH_SITES.changed(pipeline={"schedule": "zero_bubble_h1"}),
    "zero_bubble_h1, full": THROUGH_SITES.changed(
        pipeline={"schedule": "zero_bubble_h1"}, remat="full"
    ),
}


FORMULAS = {"weights": predicted_weight_bytes, "gradients": predicted_gradient_bytes}


def traced_and_predicted(model, layout):
    config = {
        "run_directory": "runs/none",
        "steps": 1,
        "topology": "two-h100-sites-2x8",
        "data": {"sources": [{"name": "none", "builtin": "python-stdlib"}]},
        **run_settings(layout),
        "model": model,
    }
    run = RunConfig.model_validate(config)
    traced = trace_on(run, abstract_mesh(layout.mesh_sizes, platform="gpu"))
    made = predict(
        model,
        layout_of_run(run),
        run.load_topology(),
        calibration=Calibration(),
    )
    return traced, made


def bytes_of(prediction, name):
    return sum(term.bytes for term in prediction.terms if term.name == name)


def between_sites(prediction):
    return sum(term.bytes for term in prediction.terms if term.network == "between_sites")


@pytest.mark.parametrize("name", IN_SITE)
def test_they_are_those_of_the_program(name):
    traced, made = traced_and_predicted(*IN_SITE[name])
    layouts = traced.layouts.parameters
    sent = evenly_sent(traced.traffic)
    predicted = no_bytes()
    for term, formula in FORMULAS.items():
        moved = formula(traced.model, layouts, traced.plan)
        add(predicted, moved)
        in_site = sum(float(count) for axes, count in moved.items() if "dc" not in axes)
        assert bytes_of(made, f"{term} in the site") == pytest.approx(in_site, rel=1e-3)
    predicted["tensor",] += bytes_of(made, "tensor collectives")
    predicted["context",] += bytes_of(made, "context collectives")
    predicted["expert",] += bytes_of(made, "expert all-to-alls")
    little = 1e-4 * float(sum(sent.values()))
    for axes in (sent.keys() | predicted.keys()) - {("dc",)}:
        count = pytest.approx(float(sent.get(axes, 0)), rel=0.02, abs=little)
        assert float(predicted[axes]) == count, axes
    over_dc = float(sent["dc",])
    assert float(predicted["dc",]) == pytest.approx(over_dc, rel=0.01)
    assert between_sites(made) == pytest.approx(over_dc, rel=0.01)
    of_site = float(traced.traffic.total_bytes_over("dc")) / 2
    assert made.links[0].bytes == pytest.approx(of_site, rel=0.01)


@pytest.mark.parametrize("name", PIPELINES)
def test_ticks_without_work_send_too(name):
    """The bytes over `dc` are those of the step's program, whose ticks a run chooses alike."""
    layout = PIPELINES[name]
    traced, made = traced_and_predicted(DENSE, layout)
    over_dc = float(traced.traffic.bytes_over("dc"))
    of_site = float(traced.traffic.total_bytes_over("dc")) / 2
    through_sites = layout.dc.role == "stage"
    tolerance = 1e-4 if through_sites else 0.01
    assert between_sites(made) == pytest.approx(over_dc, rel=tolerance)
    assert made.links[0].bytes == pytest.approx(of_site, rel=0.01)
    if through_sites:
        assert made.term("hops between sites").messages > 2 * layout.batch.microbatches
