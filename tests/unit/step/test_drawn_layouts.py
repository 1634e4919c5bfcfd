"""Any combination of parallelisms gives the loss and the gradients of one device, to 1e-10.

16 draws by default; `pytest tests/unit/step/test_drawn_layouts.py --draws 500 --draws-seed 7`
makes others.
"""

import functools

import jax
from support.drawn_layouts import ROWS, SEQUENCE, Draw, draw
from support.equality import assert_equal_gradients, gradients_of_step
from support.small_models import drawn_parameters, make_batch

from geojax import make_mesh
from geojax.models import loss_sum
from geojax.precision import policy
from geojax.step.plan import StepPlan


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("draws")
    seed = metafunc.config.getoption("draws_seed")
    drawn = [draw(seed, index) for index in range(count)]
    metafunc.parametrize("drawn", drawn, ids=[f"{seed}-{index}" for index in range(count)])


@functools.cache
def setting(model):
    parameters = drawn_parameters(model, policy("fp64").master_dtype)
    batch = make_batch(model, rows=ROWS, sequence=SEQUENCE)
    return parameters, batch, jax.random.key(7) if model.dropout else None


@functools.cache
def alone(model):
    """Loss and gradient on one device, without a mesh or a collective."""
    parameters, batch, dropout_key = setting(model)

    # Divided at the end, as a step does: the excess of experts' choices has no cotangent.
    def mean(parameters):
        total = functools.partial(loss_sum, batch=batch, config=model, dropout_key=dropout_key)
        (loss, count), gradients = jax.value_and_grad(total, has_aux=True)(parameters)
        return loss / count, jax.tree.map(lambda leaf: leaf / count, gradients)

    return jax.jit(mean)(parameters)


def test_loss_and_gradients_equal_those_of_one_device(drawn: Draw):
    model = drawn.model()
    mesh = make_mesh(**dict(drawn.axes))
    plan = StepPlan(mesh, policy("fp64"), drawn.microbatches, **dict(drawn.options))
    with jax.enable_x64(True):
        loss, gradients = alone(model)
        actual_loss, actual = gradients_of_step(model, *setting(model), plan)
        assert abs(float(actual_loss) - float(loss)) <= 1e-10 * abs(float(loss)), drawn
        # Softmax does not see what a key bias adds to all scores of a query alike.
        zero = ()
        if model.position_embedding_type == "learned_absolute":
            stacks = ("layers", "embedding.dense_layers")
            zero = tuple(f"{layers}.attention.key.bias" for layers in stacks)
        assert_equal_gradients(actual, gradients, 1e-10, zero)
