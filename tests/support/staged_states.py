"""Training states on two sites, with sites as replicas, as stages, and with stages inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support import whole_state
from support.plans import step_plan_on
from support.small_models import model_of

from geojax import make_mesh
from geojax.optim import OptimizerSettings, make_optimizer
from geojax.pipeline.schedule import Placement
from geojax.precision import policy
from geojax.sharding import leaf_layouts
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import initial_state, state_layouts

MODEL = model_of("llama").model_copy(update={"num_hidden_layers": 5, "tie_word_embeddings": True})
LAYOUTS = {
    "no pipeline": ({"dc": 2, "data": 4}, {}),
    "sites as stages": (
        {"dc": 2, "stage": 2, "data": 2},
        {
            "dc_role": "stage",
            "staged_layers": StagedLayers(Placement(4, (0, 1, 0, 2, 3)), (1, 1, 1, 1, 1)),
        },
    ),
    "other stages": (
        {"dc": 2, "stage": 2, "data": 2},
        {
            "dc_role": "stage",
            "staged_layers": StagedLayers(Placement(4, (0, 1, 2, 3)), (1, 1, 2, 1)),
        },
    ),
    "a V through the sites": (
        {"dc": 2, "data": 4},
        {
            "dc_role": "stage",
            "staged_layers": StagedLayers(Placement(2, (0, 1, 1, 0)), (1, 1, 2, 1)),
        },
    ),
    "a pipeline in each site": (
        {"dc": 2, "stage": 2, "tensor": 2},
        {"staged_layers": StagedLayers(Placement(2, (0, 1)), (3, 2))},
    ),
    "a vocabulary that stages share": (
        {"dc": 2, "stage": 2, "tensor": 2},
        {
            "head": "vocabulary",
            "staged_layers": StagedLayers(Placement(2, (0, 1)), (3, 2), 2, shares_vocabulary=True),
        },
    ),
}


def on(name):
    axes, options = LAYOUTS[name]
    plan = step_plan_on(make_mesh(**axes), policy("fp32"), **options)
    optimizer = make_optimizer(OptimizerSettings(), 10)
    return plan, optimizer, state_layouts(MODEL, optimizer, plan)


@functools.cache
def initial(name):
    plan, optimizer, layouts = on(name)
    return plan.mesh, layouts, initial_state(MODEL, optimizer, layouts, plan, 3)


SITES = ("east", "west")


def numbered(name):
    """A state whose every leaf has numbers of its own, some of them -0.0, and what it is whole."""
    mesh, layouts, state = initial(name)
    numbers = iter(range(1, 1000))

    def different(leaf):
        value = np.asarray(next(numbers), leaf.dtype)
        return np.where(np.abs(leaf) < 0.02, -np.zeros_like(leaf), leaf + value)

    whole = jax.tree.map(different, jax.device_get(whole_state.trim(state, layouts, mesh)))
    return mesh, layouts, on_devices(whole, layouts, mesh), whole


def on_devices(whole, layouts, mesh):
    padded = whole_state.pad(jax.tree.map(jnp.asarray, whole), layouts, mesh)
    return jax.device_put(padded, leaf_layouts.shardings(layouts, mesh))


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    bits = np.dtype(f"uint{8 * actual.dtype.itemsize}")
    np.testing.assert_array_equal(actual.view(bits), expected.view(bits))
