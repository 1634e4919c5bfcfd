"""The parameter tree: published counts, initial values, names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from model_families import FAMILIES

import geojax
from geojax.models import (
    ModelConfig,
    init_parameters,
    parameter_count,
    parameter_kinds,
    parameter_shapes,
)
from geojax.models.flops import active_parameter_count, model_flops
from geojax.named_arrays import leaves_by_name


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        # Published exactly, with the weights.
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("gemma2-9b", 9_241_705_984),
        ("gemma3-1b", 999_885_952),
        ("mixtral-8x7b", 46_702_792_704),
        # The paper's table D.1 says 174,600 million; this is what its shape gives.
        ("gpt3-175b", 174_604_259_328),
        ("tiny", 5_770_496),
    ],
)
def test_published_counts(preset, count):
    assert parameter_count(ModelConfig.load(preset)) == count


@pytest.mark.parametrize(
    ("preset", "embedding", "rest"),
    [("nemotron4-15b", 3.2e9, 12.5e9), ("nemotron4-340b", 9.4e9, 331.6e9)],
)
def test_nemotron_counts_as_its_reports_split_them(preset, embedding, rest):
    config = ModelConfig.load(preset)
    tables = 2 * config.vocab_size * config.hidden_size  # the embedding and the untied head
    # The reports print one decimal (and 3.15 as 3.2).
    assert tables == pytest.approx(embedding, abs=0.055e9)
    assert parameter_count(config) - tables == pytest.approx(rest, abs=0.05e9)


def test_gemma3_counts_as_its_report_splits_them():
    """Table 1: embedding and the rest; the former with 6M that project images."""
    config = ModelConfig.load("gemma3-27b")
    table = config.vocab_size * config.hidden_size
    assert table == pytest.approx(1_416e6 - 6e6, rel=1e-3)
    assert parameter_count(config) - table == pytest.approx(25_600e6, rel=1e-3)


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [("gpt-oss-20b", 20.91e9, 3.61e9), ("gpt-oss-120b", 116.83e9, 5.13e9)],
)
def test_gpt_oss_counts_as_its_model_card(preset, total, active):
    """Table 1 counts the head as active and the embedding not."""
    config = ModelConfig.load(preset)
    assert parameter_count(config) == pytest.approx(total, abs=0.005e9)
    table = config.vocab_size * config.hidden_size
    assert active_parameter_count(config) - table == pytest.approx(active, abs=0.005e9)


def test_initial_values(config):
    config = config.replace(hidden_size=64, intermediate_size=256, moe_intermediate_size=256)
    parameters = init_parameters(config, jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), parameters) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), parameter_shapes(config)
    )
    layers = parameters["layers"]
    block = layers["experts" if config.is_moe else "feed_forward"]
    up, down = block["up"], block["down"]
    assert np.std(up["kernel"]) == pytest.approx(0.02, rel=0.03)
    assert np.std(down["kernel"]) == pytest.approx(
        0.02 / np.sqrt(2 * config.num_hidden_layers), rel=0.03
    )
    assert (
        np.abs(np.corrcoef(up["kernel"].reshape(config.num_hidden_layers, -1))).sum()
        < config.num_hidden_layers + 0.2
    )
    assert (layers["attention_norm"]["scale"] == (0 if config.norm.endswith("1p") else 1)).all()
    assert all((up["bias"] == 0).all() for _ in range(config.mlp_bias))


def test_initial_values_do_not_depend_on_sharding_or_dtype():
    config = FAMILIES["llama"]
    key = jax.random.key(3)
    mesh = geojax.make_mesh(dc=2, data=4)
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(
        lambda leaf: sharding if leaf.ndim == 3 else whole, parameter_shapes(config)
    )
    init = jax.jit(lambda k: init_parameters(config, k), out_shardings=shardings)
    want = jax.jit(lambda k: init_parameters(config, k))(key)
    jax.tree.map(np.testing.assert_array_equal, init(key), want)
    narrow = init_parameters(config, key, jnp.bfloat16)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), narrow, want
    )


def test_matrices_and_tables_are_told_from_scales_and_biases(config):
    dims = {True: (3, 2), False: (2, 1)}  # with and without the layers dim
    kind_of = parameter_kinds(config)
    for name, leaf in leaves_by_name(parameter_shapes(config)).items():
        want = dims[kind_of(name) != "vector"][0 if name.startswith("layers.") else 1]
        assert leaf.ndim == want + (".experts." in name), name


def test_model_flops_are_the_published_formulas():
    # Narayanan et al. 2021, equation 3, without recomputation: 72 l h^2 (1 + s/6h + V/12lh).
    config, sequence = ModelConfig.load("gpt3-175b"), 2048
    width, layers = config.hidden_size, config.num_hidden_layers
    want = 72 * layers * width**2 + 12 * layers * width * sequence + 6 * config.vocab_size * width
    assert model_flops(config, sequence) == want
    # Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T, N without the embedding and the norms.
    config = ModelConfig.load("llama3-8b")
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert model_flops(config, 8192) == 6 * weights + 12 * 32 * 32 * 128 * 8192


def test_a_window_bounds_the_positions_that_count():
    config, sequence = ModelConfig.load("llama3-8b"), 8192
    of_layer = 12 * 32 * 128
    for window, kinds, positions in [
        (1024, ("sliding_attention",), 32 * 1024),
        (1024, ("sliding_attention",) * 5 + ("full_attention",), 27 * 1024 + 5 * 8192),
        (16384, ("sliding_attention",), 32 * 8192),
    ]:
        windowed = config.replace(sliding_window=window, layer_types=kinds)
        less = of_layer * (32 * 8192 - positions)
        assert model_flops(config, sequence) - model_flops(windowed, sequence) == less
