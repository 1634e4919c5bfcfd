"""The layouts that people choose, in fp32: as near to float64 as one device, leaf by leaf."""

import functools

import jax
import pytest
from support.distances import assert_no_further_than, distances
from support.drawn_layouts import Draw
from support.equality import gradients_of_step, in_float64, on_one_device
from support.small_models import drawn_parameters, make_batch

from geojax import make_mesh
from geojax.precision import policy
from geojax.step.plan import StepPlan

RING, GATHER, ULYSSES = ({"context_method": method} for method in ("ring", "all_gather", "ulysses"))
SEQUENCE_PARALLEL = {"sequence_parallel": True}
LAYOUTS = {
    "zero-2": ({"dc": 2, "data": 4}, {"zero_stage": 2}),
    "zero-3": ({"dc": 2, "data": 4}, {"zero_stage": 3, "remat": "full"}),
    "zero-1-across-sites": ({"dc": 2, "data": 4}, {"shard_across_sites": True}),
    "overlap": ({"dc": 2, "data": 4}, {"overlap_grad_reduce": True}),
    "tensor": ({"dc": 2, "tensor": 4}, {}),
    "tensor-sequence-zero-3": (
        {"dc": 2, "data": 2, "tensor": 2},
        SEQUENCE_PARALLEL | {"zero_stage": 3},
    ),
    "ring": ({"dc": 2, "context": 4}, RING),
    "all-gather-keys": ({"dc": 2, "data": 2, "context": 2}, GATHER | {"zero_stage": 2}),
    "ulysses": ({"dc": 2, "data": 2, "context": 2}, ULYSSES),
    "all-inside-a-site": (
        {"data": 2, "context": 2, "tensor": 2},
        SEQUENCE_PARALLEL | RING | {"zero_stage": 3, "remat": "selective"},
    ),
    "experts": ({"dc": 2, "expert": 4}, {}),
    "experts-tensor": ({"dc": 2, "expert": 2, "tensor": 2}, SEQUENCE_PARALLEL | {"zero_stage": 2}),
}


@functools.cache
def alone(mixture):
    """A model with parameters, a batch and a dropout key; its loss and gradients in float64, and
    how far those of one device are from them."""
    model = Draw("llama", mixture, 2, 0.1, (), 1, ()).model()
    given = model, drawn_parameters(model), make_batch(model), jax.random.key(7)
    exact = in_float64(*given)
    return given, exact, distances(on_one_device(*given), exact)


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_are_as_near_to_float64_as_those_of_one_device(name):
    axes, options = LAYOUTS[name]
    given, exact, one_device = alone("dropless" if "expert" in axes else "dense")
    plan = StepPlan(make_mesh(**axes), policy("fp32"), bucket_bytes=4096, **options)
    assert_no_further_than(one_device, distances(gradients_of_step(*given, plan), exact))
