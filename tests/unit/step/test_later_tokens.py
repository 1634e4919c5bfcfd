"""Modules for later tokens on layouts: loss and gradients of one device, in float64."""

import functools

import jax
import numpy as np
from support.drawn_layouts import ROWS, SEQUENCE, Draw
from support.equality import assert_equal_gradients, gradients_of_step
from support.small_models import drawn_parameters, make_batch

from geojax import make_mesh
from geojax.models import loss_sum
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import policy
from geojax.step.plan import StepPlan
from geojax.step.stage_layers import StagedLayers

MODEL = (
    Draw("deepseek", "balanced", 8, 0.0, (), 1, ())
    .model()
    .replace(
        num_hidden_layers=2,
        first_k_dense_replace=0,
        num_nextn_predict_layers=1,
        mtp_loss_scaling_factor=0.3,
    )
)


@functools.cache
def one_device():
    """Parameters, a batch, and the mean loss and its gradients."""
    parameters = drawn_parameters(MODEL, policy("fp64").master_dtype)
    batch = make_batch(MODEL, rows=ROWS, sequence=SEQUENCE)
    total = functools.partial(loss_sum, batch=batch, config=MODEL)
    (loss, count), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(parameters)
    mean = jax.tree.map(lambda leaf: np.asarray(leaf / count), gradients)
    return parameters, batch, float(loss / count), mean


def check(plan):
    """Loss and every gradient on a layout, within 1e-10."""
    with jax.enable_x64(True):
        parameters, batch, loss, expected = one_device()
        found, gradients = gradients_of_step(MODEL, parameters, batch, None, plan)
        assert abs(float(found) - loss) <= 1e-10 * loss
        assert_equal_gradients(gradients, expected, 1e-10)


def test_loss_and_gradients_are_those_of_one_device():
    mesh = make_mesh(devices=jax.devices(), dc=2, data=2, tensor=2)
    check(StepPlan(mesh, policy("fp64"), sequence_parallel=True, zero_stage=3, bucket_bytes=4096))


def test_they_lie_with_the_head_on_the_last_stage():
    placement = Placement.linear(2)
    table = tick_table("1f1b", placement, 2, [1])
    plan = StepPlan(
        make_mesh(devices=jax.devices()[:4], stage=2, expert=2),
        policy("fp64"),
        2,
        staged_layers=StagedLayers(placement, (1, 1)),
        tick_program=TickProgram.of(table, branch_free=False),
    )
    check(plan)
