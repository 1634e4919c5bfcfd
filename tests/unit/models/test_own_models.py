"""Models of anybody's modules: every layout gives what the modules give alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.equality import assert_equal_gradients, gradients_of_step
from support.own_models import own_model, plain_loss
from support.plans import step_plan_on
from support.small_models import make_batch

from geojax import make_mesh
from geojax.models import OwnModel, init_parameters
from geojax.models.lora import LoraSettings
from geojax.precision import RECIPES, policy

LAYOUTS = {
    "sites": ({"dc": 2, "data": 2}, {"microbatches": 2}),
    "sharded weights": ({"dc": 2, "data": 2}, {"microbatches": 2, "zero_stage": 3}),
    "selective": ({"dc": 2}, {"remat": "selective", "zero_stage": 2}),
    "full": ({"data": 2}, {"remat": "full", "zero_stage": 0}),
}


@functools.cache
def parameters_of(name, **arguments):
    with jax.enable_x64():
        return init_parameters(own_model(name, **arguments), jax.random.key(1), jnp.float64)


@functools.cache
def plain(name):
    model = own_model(name)
    with jax.enable_x64():
        batch = make_batch(model)
        return jax.jit(jax.value_and_grad(functools.partial(plain_loss, model)))(
            parameters_of(name), {key: jnp.asarray(value) for key, value in batch.items()}
        )


# Each model and each layout, and those pairs that differ most.
PAIRS = [
    ("pattern", "sites"),
    ("pattern", "full"),
    ("linen", "sharded weights"),
    ("tied", "sites"),
    ("tied", "selective"),
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_a_layout_gives_what_the_modules_give(name, layout):
    axes, options = LAYOUTS[layout]
    model, (loss, gradients) = own_model(name), plain(name)
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    with jax.enable_x64():
        plan = step_plan_on(make_mesh(devices=devices, **axes), policy("fp64"), **options)
        made = gradients_of_step(model, parameters_of(name), make_batch(model), None, plan)
        assert abs(float(made.loss) - float(loss)) <= 1e-10 * float(loss)
        # A key's bias adds the same to all scores of a query.
        zero = [
            path for path in _names(gradients) if path.endswith(("key.bias", "products.1.bias"))
        ]
        assert_equal_gradients(made.gradients, gradients, 1e-10, zero)


def _names(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]


@pytest.mark.parametrize("name", ["pattern", "linen"])
def test_masks_are_the_same_on_every_layout(name):
    model, key = own_model(name, rate=0.3), jax.random.key(7)
    with jax.enable_x64():
        parameters, batch = parameters_of(name, rate=0.3), make_batch(model)
        alone = step_plan_on(make_mesh(devices=jax.devices()[:1]), policy("fp64"))
        spread = step_plan_on(
            make_mesh(devices=jax.devices()[:4], dc=2, data=2), policy("fp64"), microbatches=2
        )
        one = gradients_of_step(model, parameters, batch, key, alone)
        other = gradients_of_step(model, parameters, batch, key, spread)
        assert abs(float(one.loss) - float(other.loss)) <= 1e-10 * float(one.loss)
        plain = gradients_of_step(model, parameters, batch, None, alone)
        assert abs(float(one.loss) - float(plain.loss)) > 1e-4


SHARED = [
    ({"wrapped": True}, {"data": 2, "tensor": 2}, {}),
    ({"wrapped": True}, {"dc": 2, "context": 2}, {}),
    ({}, {"dc": 2, "tensor": 2}, {"sequence_parallel": True, "zero_stage": 3}),
    ({"experts": 4}, {"tensor": 2, "expert": 2}, {"sequence_parallel": True}),
    ({"experts": 4}, {"dc": 2, "expert": 2}, {"remat": "selective"}),
    ({"lora": LoraSettings(rank=2)}, {"tensor": 2}, {"sequence_parallel": True, "zero_stage": 3}),
]


@pytest.mark.parametrize(("arguments", "axes", "options"), SHARED)
def test_layers_of_geojax_are_shared_inside(arguments, axes, options):
    one, other = _on_both(arguments, axes, options, policy("fp64"))
    assert abs(float(one.loss) - float(other.loss)) <= 1e-10 * float(one.loss)
    assert_equal_gradients(other.gradients, jax.tree.map(np.asarray, one.gradients), 1e-10)


def test_layers_of_geojax_multiply_in_fp8():
    recipe = dataclasses.replace(policy("fp64"), recipe=RECIPES["current"])
    options = {"sequence_parallel": True, "zero_stage": 3}
    # Three periods, of which the middle one follows the recipe.
    arguments = {"experts": 4, "layers": 6, "keys": 2}
    one, other = _on_both(arguments, {"tensor": 2}, options, recipe)
    assert_equal_gradients(other.gradients, jax.tree.map(np.asarray, one.gradients), 1e-10)
    plain, _ = _on_both(arguments, {"tensor": 2}, options, policy("fp64"))
    assert 1e-6 < abs(float(one.loss) / float(plain.loss) - 1) < 1e-2


def _on_both(arguments, axes, options, computed_in):
    """Loss and gradients on one device, and on as many as `axes` have."""
    model = OwnModel(module="support.own_models:build_of_parts", vocab_size=29, **arguments)
    size = int(np.prod(list(axes.values())))
    with jax.enable_x64():
        initial = functools.partial(init_parameters, model, dtype=jnp.float64)
        parameters, batch = jax.jit(initial)(jax.random.key(1)), make_batch(model)
        if model.lora is not None:  # whose halves that begin as zero leave the others no gradient
            parameters = jax.tree.map(lambda leaf: leaf + 0.01, parameters)
        alone = step_plan_on(make_mesh(devices=jax.devices()[:1]), computed_in)
        shared = make_mesh(devices=jax.devices()[:size], **axes)
        plans = alone, step_plan_on(shared, computed_in, **options)
        return [gradients_of_step(model, parameters, batch, None, plan) for plan in plans]
