"""A checkpoint of a pipeline restores onto a mesh without one, and the other way round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import model_of

from geojax import make_mesh
from geojax.checkpoint import Checkpointer
from geojax.optim import OptimizerSettings, layout, make_optimizer
from geojax.pipeline.schedule import Placement
from geojax.precision import policy
from geojax.step.plan import StepPlan
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
    "a pipeline in each site": (
        {"dc": 2, "stage": 2, "tensor": 2},
        {"staged_layers": StagedLayers(Placement(2, (0, 1)), (3, 2))},
    ),
}


def on(name):
    axes, options = LAYOUTS[name]
    plan = StepPlan(make_mesh(**axes), policy("fp32"), **options)
    optimizer = make_optimizer(OptimizerSettings(), 10)
    return plan, optimizer, state_layouts(MODEL, optimizer, plan)


def initial(name):
    plan, optimizer, layouts = on(name)
    return plan.mesh, layouts, initial_state(MODEL, optimizer, layouts, plan, 3)


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ("no pipeline", "sites as stages"),
        ("sites as stages", "a pipeline in each site"),
        ("a pipeline in each site", "no pipeline"),
    ],
)
def test_the_state_is_the_models_whatever_holds_it(tmp_path, saved, restored):
    mesh, layouts, state = initial(saved)
    whole = jax.device_get(layout.trim(state, layouts, mesh))
    # Moments are zero at first: give every leaf numbers of its own.
    numbers = iter(range(1, 1000))
    different = jax.tree.map(lambda leaf: leaf + np.asarray(next(numbers), leaf.dtype), whole)
    state = layout.pad(jax.tree.map(jnp.asarray, different), layouts, mesh)

    other_mesh, other_layouts, other = initial(restored)
    jax.tree.map(
        np.testing.assert_array_equal, layout.trim(other, other_layouts, other_mesh), whole
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, layout.trim(state, layouts, mesh), {})
        wanted = layout.abstract_unpadded(other_layouts, other_mesh)
        arrays, _ = checkpointer.restore(wanted)
    again = layout.pad(arrays, other_layouts, other_mesh)
    for leaf, expected in zip(jax.tree.leaves(again), jax.tree.leaves(other), strict=True):
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
    trimmed = layout.trim(again, other_layouts, other_mesh)
    jax.tree.map(np.testing.assert_array_equal, trimmed, different)
