"""An optimizer is one entry of the registry."""

import jax
import jax.numpy as jnp
import optax
import pytest

from geojax.errors import UserError
from geojax.models.declaration import kind_by_name
from geojax.named_arrays import leaves_by_name
from geojax.optim import OptimizerSettings, make_optimizer, optimizer_layouts
from geojax.optim.registry import OPTIMIZERS, OptimizerEntry
from geojax.settings import validate
from geojax.sharding import bytes_per_device, leaf_layout


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match="name: no optimizer is called 'adam'; choose one of adamw"):
        validate(OptimizerSettings, {"name": "adam"}, "run.yaml")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_entry_makes_a_chain_that_goes_downhill(name):
    assert OPTIMIZERS[name].description.endswith(".")
    settings = OptimizerSettings(name=name, warmup_steps=0, schedule="constant")
    optimizer = make_optimizer(settings, 10)
    parameters = {"kernel": jnp.ones((2, 2))}
    updates, _ = optimizer.update(parameters, optimizer.init(parameters), parameters)
    assert jnp.all(updates["kernel"] < 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bf16_moments_are_stored_in_half_the_bytes(name):
    layouts = {"kernel": leaf_layout((4, 6), jnp.float32, {"data": 2}, stacked=False)}
    bytes_of = {}
    for dtype in ("master", "bf16"):
        settings = OptimizerSettings(name=name, moment_dtype=dtype, schedule="constant")
        held = leaves_by_name(optimizer_layouts(make_optimizer(settings, 10), layouts))
        moments = [leaf for key, leaf in held.items() if leaf.shape and ".average." not in key]
        bytes_of[dtype] = bytes_per_device(moments)
    factor = 1 if name == "adafactor" else 2  # which has means, of numbers a row
    assert bytes_of["bf16"] == bytes_of["master"] / factor > 0


def test_means_of_adafactor_are_followed_late_in_a_run_too():
    """There they change by less than a thousandth of their size."""
    settings = OptimizerSettings(name="adafactor", moment_dtype="bf16")
    scaling = OPTIMIZERS["adafactor"].directions(settings, kind_by_name)
    gradients = {"kernel": jnp.ones((2, 3))}
    _, early = scaling.update(gradients, scaling.init(gradients))
    smaller = jax.tree.map(lambda leaf: 0.1 * leaf, gradients)
    _, late = scaling.update(smaller, early._replace(count=jnp.int32(10_000)))
    assert jnp.all(late.row_means["kernel"] < early.row_means["kernel"])


def test_bf16_moments_need_a_decay_that_bf16_can_follow():
    with pytest.raises(UserError, match=r"moment_dtype=bf16 requires beta2 of 0\.99 or less"):
        validate(OptimizerSettings, {"moment_dtype": "bf16", "beta2": 0.999}, "run.yaml")


def test_a_new_entry_is_in_the_config(monkeypatch):
    entry = OptimizerEntry("sign", "The sign.", lambda settings, kind_of: optax.scale_by_sign())
    monkeypatch.setitem(OPTIMIZERS, "sign", entry)
    optimizer = make_optimizer(OptimizerSettings(name="sign"), 10)
    assert jax.tree.leaves(optimizer.init({"kernel": jnp.ones(2)}))[0].shape == ()


def test_a_state_that_is_not_element_by_element_is_refused():
    layouts = {"kernel": leaf_layout((256, 256), jnp.float32, {}, stacked=False)}
    with pytest.raises(ValueError, match="on shards a state needs the shape of its parameter"):
        optimizer_layouts(optax.scale_by_factored_rms(), layouts)
