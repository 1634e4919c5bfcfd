"""The terms of the cost model that are bytes, beside what the step's trace counts.

Within 1% over `dc` and 2% over the axes of a site.
"""

import dataclasses

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
DATA = LayoutCandidate(dc=2, data=4, tensor=2, sequence_parallel=True, microbatches=2, zero_stage=1)
CONTEXT = dataclasses.replace(DATA, data=2, context=2)
STAGES = dataclasses.replace(DATA, pipeline_stages=2, data=2, microbatches=8, schedule="1f1b")
THROUGH_SITES = dataclasses.replace(STAGES, dc_role="stage", pipeline_stages=4)


def changed(layout, **changes):
    return dataclasses.replace(layout, **changes)


IN_SITE = {
    "zero 0": (DENSE, changed(DATA, zero_stage=0)),
    "zero 1": (DENSE, DATA),
    "zero 2": (DENSE, changed(DATA, zero_stage=2)),
    "zero 3": (DENSE, changed(DATA, zero_stage=3)),
    "zero 3, weights kept": (
        DENSE,
        changed(DATA, zero_stage=3, reshard_after_forward=False, remat="full"),
    ),
    "across sites": (DENSE, changed(DATA, shard_across_sites=True)),
    "int8": (DENSE, changed(DATA, gradient_compression="int8")),
    "overlap": (DENSE, changed(DATA, overlap_grad_reduce=True, bucket_layers=2)),
    "tensor, full": (DENSE, changed(DATA, sequence_parallel=False, remat="full")),
    "sequence, selective": (DENSE, changed(DATA, remat="selective")),
    "fp8": (DENSE, changed(DATA, precision="fp8-delayed", zero_stage=3)),
    "ring": (DENSE, changed(CONTEXT, context_method="ring")),
    "gathered keys": (DENSE, changed(CONTEXT, context_method="all_gather")),
    "ulysses": (DENSE, changed(CONTEXT, context_method="ulysses", remat="full")),
    "experts": (
        MIXTURE,
        LayoutCandidate(dc=2, data=2, expert=4, microbatches=2, zero_stage=1),
    ),
    "experts, full": (
        MIXTURE,
        LayoutCandidate(dc=2, data=2, expert=4, microbatches=2, zero_stage=3, remat="full"),
    ),
}
PIPELINES = {
    "in sites": changed(STAGES, virtual_stages=2, schedule="interleaved"),
    "branch_free": changed(THROUGH_SITES, schedule="branch_free"),
    "geopipe": changed(THROUGH_SITES, schedule="geopipe"),
    "geopipe, next tick": changed(THROUGH_SITES, schedule="geopipe", hop_ticks=1),
    "interleaved": changed(THROUGH_SITES, schedule="interleaved", virtual_stages=2),
    "1f1b": THROUGH_SITES,
    "1f1b, memory": changed(THROUGH_SITES, memory_limit=8),
    "zero_bubble_h1": changed(THROUGH_SITES, schedule="zero_bubble_h1"),
    "zero_bubble_h1, full": changed(THROUGH_SITES, schedule="zero_bubble_h1", remat="full"),
}


FORMULAS = {"weights": predicted_weight_bytes, "gradients": predicted_gradient_bytes}


def traced_and_predicted(model, layout):
    config = {
        "run_directory": "runs/none",
        "steps": 1,
        "topology": "two-h100-sites-2x8",
        "data": {"sources": [{"name": "none", "builtin": "python-stdlib"}]},
        **run_settings(layout, SEQUENCE),
        "model": model,
    }
    run = RunConfig.model_validate(config)
    traced = trace_on(run, abstract_mesh(layout.mesh_sizes, platform="gpu"))
    made = predict(
        model,
        layout_of_run(run),
        run.load_topology(),
        sequence_length=SEQUENCE,
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
    through_sites = layout.dc_role == "stage"
    tolerance = 1e-4 if through_sites else 0.01
    assert between_sites(made) == pytest.approx(over_dc, rel=tolerance)
    assert made.links[0].bytes == pytest.approx(of_site, rel=0.01)
    if through_sites:
        assert made.term("hops between sites").messages > 2 * layout.microbatches
