"""The layouts that people choose, in fp32: loss and every gradient of one device, to 1e-5."""

import functools

import jax
import pytest
from support.drawn_layouts import Draw
from support.equality import assert_equal_gradients, gradients_of_step
from support.small_models import drawn_parameters, make_batch

from geojax import make_mesh
from geojax.models import loss_sum
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
    """A model with parameters, a batch and a dropout key; its loss and gradients on one device."""
    model = Draw("llama", mixture, 2, 0.1, (), 1, ()).model()
    parameters = drawn_parameters(model)
    batch, dropout_key = make_batch(model), jax.random.key(7)

    def mean(parameters):
        total, count = loss_sum(parameters, batch, model, dropout_key=dropout_key)
        return total / count

    given = model, parameters, batch, dropout_key
    return given, *jax.jit(jax.value_and_grad(mean))(parameters)


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_equal_those_of_one_device(name):
    axes, options = LAYOUTS[name]
    given, loss, gradients = alone("dropless" if "expert" in axes else "dense")
    plan = StepPlan(make_mesh(**axes), policy("fp32"), bucket_bytes=4096, **options)
    actual_loss, actual = gradients_of_step(*given, plan)
    assert abs(float(actual_loss) - float(loss)) <= 1e-5 * float(loss)
    assert_equal_gradients(actual, gradients, 1e-5)
