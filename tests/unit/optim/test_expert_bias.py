"""The biases that balance experts: moved by the sign of the excess, seen by nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest

from geojax.named_arrays import leaves_by_name
from geojax.optim import (
    OptimizerSettings,
    apply_updates,
    global_norm,
    make_optimizer,
)
from geojax.optim.averages import evaluated_weights

RATE = 1e-3
EXCESS = jnp.asarray([[4096.0, -8.0, 0.0, -1e-6]])


def trees():
    parameters = {"kernel": jnp.ones((3, 4)), "score_bias": jnp.full((1, 4), 0.25)}
    gradients = {"kernel": jnp.full((3, 4), 1e-2), "score_bias": EXCESS}
    return {"layers": {"router": parameters}}, {"layers": {"router": gradients}}


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "schedule_free_adamw"])
def test_a_bias_moves_against_the_sign_of_its_excess_alone(name):
    parameters, gradients = trees()
    settings = OptimizerSettings(
        name=name, schedule="constant", warmup_steps=0, router_bias_rate=RATE, clip_norm=0.1
    )
    optimizer = make_optimizer(settings, 10)
    state = optimizer.init(parameters)
    for _ in range(3):
        updates, state = optimizer.update(gradients, state, parameters, finite=True)
        parameters = apply_updates(parameters, updates, True)
    moved = parameters["layers"]["router"]["score_bias"]
    np.testing.assert_allclose(moved, 0.25 - 3 * RATE * np.sign(EXCESS), rtol=1e-6)
    evaluated = evaluated_weights(parameters, state)["layers"]["router"]["score_bias"]
    np.testing.assert_allclose(evaluated, moved, rtol=1e-6)
    biases = [
        leaf
        for name, leaf in leaves_by_name(state).items()
        if leaf.shape == EXCESS.shape and ".average." not in name
    ]
    assert all(not leaf.any() for leaf in biases), "an optimizer's moments are of weights"
    without = {"kernel": gradients["layers"]["router"]["kernel"]}
    assert global_norm(gradients) == global_norm(without)


def test_a_skipped_step_leaves_a_bias_as_it_is():
    parameters, gradients = trees()
    optimizer = make_optimizer(OptimizerSettings(), 10)
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters, finite=False)
    kept = apply_updates(parameters, updates, False)["layers"]["router"]["score_bias"]
    np.testing.assert_array_equal(kept, parameters["layers"]["router"]["score_bias"])
