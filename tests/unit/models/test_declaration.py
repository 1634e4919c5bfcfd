"""Modules declare their parameters, and what is known of each is read off them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from model_families import FAMILIES

from geojax.models import ModelConfig
from geojax.models.block import Block
from geojax.models.declaration import (
    Declaration,
    constant,
    declared,
    kind_by_name,
    normal,
    parameter,
    stacked,
)
from geojax.models.layers import Linear
from geojax.models.lora import LoraSettings
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.partition import partitions
from geojax.models.parameters import declarations


class Scaled(nnx.Module):
    """A module of anybody's, with a part of its own."""

    def __init__(self):
        self.scale = parameter((3,), constant(2.0), axes=("tensor",), is_wide=True)
        self.plain = Plain()


class Plain(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jax.ShapeDtypeStruct((3, 5), jnp.float32))
        self.cache = nnx.Variable(jax.ShapeDtypeStruct((7,), jnp.float32))


def test_a_tree_has_what_belongs_to_each_parameter_and_nothing_else():
    tree = declared(Scaled())
    assert tree == {
        "scale": Declaration((3,), axes=("tensor",), kind="vector", is_wide=True),
        "plain": {"kernel": Declaration((3, 5))},
    }
    drawn = tree["scale"].initial(jax.random.key(0), (4, 3))
    assert drawn.shape == (4, 3)
    assert (drawn == 2).all()


def test_layers_are_stacked_on_a_leading_dim():
    tree = stacked(declared(Scaled()), 4)
    assert tree["scale"] == Declaration((4, 3), axes=(None, "tensor"), kind="vector", is_wide=True)
    assert tree["plain"]["kernel"].shape == (4, 3, 5)


def test_the_optimizer_knows_what_each_parameter_is():
    adapted = FAMILIES["llama"].replace(lora=LoraSettings(rank=2))
    kinds = declared(Linear(4, 8, adapted, bias=True, target="q_proj"))
    assert {name: leaf.kind for name, leaf in kinds.items()} == {
        "kernel": "matrix",
        "bias": "vector",
        "lora_a": "adapter",
        "lora_b": "adapter",
    }
    names = ("layers.mix.kernel", "head.out.kernel", "embedding.embedding", "layers.norm.scale")
    assert [kind_by_name(name) for name in names] == ["matrix", "table", "table", "vector"]


def test_nothing_is_made_on_a_device_to_know_a_shape(monkeypatch):
    monkeypatch.setattr(jax.random, "normal", lambda *_: pytest.fail("drawn"))
    declarations.cache_clear()
    for config in FAMILIES.values():
        assert all(isinstance(leaf, Declaration) for leaf in jax.tree.leaves(declarations(config)))


def test_outputs_into_the_stream_begin_smaller(config: ModelConfig):
    key, shape = jax.random.key(1), (64, 64)
    block = declared(Block(config.replace(num_hidden_layers=8)))
    made = {
        name: block["attention"][name]["kernel"].initial(key, shape) for name in ("query", "output")
    }
    assert jnp.allclose(made["output"], made["query"] / 4)
    assert jnp.allclose(made["query"], normal(config.initializer_range)(key, shape))


def test_ranks_with_fewer_heads_than_ranks_hold_keys_whole_and_slice_them():
    model = FAMILIES["llama"]
    assert model.num_key_value_heads == 2
    for tensor, dims in ((2, {2: ("tensor",)}), (4, {})):
        attention = partitions(model, Parallelism(tensor=tensor))["layers"]["attention"]
        key = attention["key"]["kernel"]
        assert (key.axes_by_dim, key.partial) == (dims, tensor > 2)
        assert attention["query"]["kernel"].axes_by_dim == {2: ("tensor",)}


@pytest.mark.parametrize(("sharding", "whole"), [("columns", "lora_a"), ("rows", "lora_b")])
def test_an_adapter_is_sharded_as_its_kernel_is(sharding, whole):
    model = FAMILIES["llama"].replace(lora=LoraSettings(rank=2))
    linear = declared(Linear(8, 6, model, sharding=sharding, target="q_proj"))
    for name in ("lora_a", "lora_b"):
        assert ("tensor" in linear[name].axes) == (name != whole)
        assert linear[name].in_parts
    dims = {name: leaf.shape for name, leaf in linear.items()}
    assert dims == {"kernel": (8, 6), "lora_a": (8, 2), "lora_b": (2, 6)}
    assert "lora_a" not in declared(Linear(8, 6, model, experts=3, target="up_proj"))
