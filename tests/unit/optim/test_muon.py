"""Muon: which matrices, in which shares, and where it cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import model_of

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.models import parameter_kinds, parameter_shapes
from geojax.named_arrays import leaves_by_name
from geojax.optim import OptimizerSettings, make_optimizer
from geojax.optim.algorithms.matrix_shares import matrix_group, matrix_groups
from geojax.optim.algorithms.muon import orthogonalize
from geojax.settings import validate
from geojax.sharding import DimSharding, LeafLayout

SETTINGS = OptimizerSettings(name="muon")


def test_matrices_of_layers_have_momentum_and_the_rest_is_adamws():
    model = model_of("gpt3")
    shapes, optimizer = (
        parameter_shapes(model),
        make_optimizer(SETTINGS, 10, parameter_kinds(model)),
    )
    held = leaves_by_name(jax.eval_shape(optimizer.init, shapes))
    for name in leaves_by_name(shapes):
        kept = [key for key in held if key.endswith(f".{name}")]
        hidden = name.startswith("layers.") and name.endswith(".kernel")
        assert len(kept) == (1 if hidden else 2), kept
        assert all((".muon." in key) == hidden for key in kept)


def test_singular_values_come_near_one_whatever_the_number_at_once(monkeypatch):
    matrices = jnp.asarray(np.random.default_rng(0).normal(size=(5, 12, 20)), jnp.float32)
    made = orthogonalize(matrices, 1e-8)
    values = np.linalg.svd(np.asarray(made), compute_uv=False)
    assert values.min() > 0.5
    assert values.max() < 1.3
    monkeypatch.setattr("geojax.optim.algorithms.muon._NUMBERS_AT_ONCE", 2 * 12 * 20)
    np.testing.assert_allclose(orthogonalize(matrices, 1e-8), made, rtol=1e-4, atol=1e-5)


def test_leaves_of_one_shape_and_cut_share_their_rounds():
    zero, tensor = DimSharding(1, ("data", "expert"), 8), DimSharding(2, ("tensor",), 2)
    up = LeafLayout((96, 64, 256), jnp.dtype("float32"), (tensor,), zero)
    gate = LeafLayout((96, 64, 256), jnp.dtype("float32"), (tensor,), zero)
    down = LeafLayout((96, 256, 64), jnp.dtype("float32"), (DimSharding(1, ("tensor",), 2),), zero)
    groups = matrix_groups({"up": up, "gate": gate, "down": down})
    assert groups == {matrix_group(up): 192, matrix_group(down): 96}
    assert matrix_group(up).ranks == matrix_group(down).ranks == 16
    assert matrix_group(up).exchanged(192) == 192
    assert matrix_group(up).exchanged(5) == 16


def test_sharded_experts_are_whole_where_they_lie():
    experts = LeafLayout(
        (4, 16, 64, 96),
        jnp.dtype("float32"),
        (DimSharding(1, ("expert",), 2),),
        DimSharding(1, ("data",), 4),
    )
    assert matrix_groups([experts]) == {matrix_group(experts): 4 * 2}
    assert matrix_group(experts).cuts == ()


def test_state_sharded_over_sites_is_refused():
    content = {
        "run_directory": "run",
        "steps": 1,
        "model": model_of("llama"),
        "data": {},
        "batch": {"global_batch_size": 8, "sequence_length": 32},
        "mesh": {"dc": 2},
        "zero": {"across_sites": True},
        "optimizer": {"name": "muon"},
    }
    with pytest.raises(UserError, match=r"optimizer muon requires zero\.across_sites=false"):
        validate(RunConfig, content, "run.yaml")
