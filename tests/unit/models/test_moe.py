"""Mixtures of experts on one device, against one token after the other in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mixtures import MIXTURES, model_with, moe_half, moe_model, uneven_parameters
from plain_transformer import plain_mixture

from geojax.models import (
    ModelConfig,
    parameter_count,
)
from geojax.models.flops import active_parameter_count, model_flops
from geojax.models.moe import weighted_aux_loss
from geojax.models.moe.aux_loss import AuxLosses, auxiliary_losses
from geojax.models.moe.capacity import drop, expert_capacity
from geojax.models.moe.router import Router, Routing
from geojax.models.parallel.parallelism import SINGLE_DEVICE


def _rows(hidden, rows=3, columns=13):
    """A stream, and segment ids with padding at the end of the last row."""
    x = np.random.default_rng(5).standard_normal((rows, columns, hidden))
    segment_ids = np.ones((rows, columns), np.int32)
    segment_ids[0, 6:], segment_ids[-1, 9:] = 2, 0
    return x, segment_ids


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_outputs_balance_and_every_gradient_equal_the_plain_ones(mixture, activation, x64):
    config = model_with(mixture, hidden_act=activation)
    layer = jax.tree.map(lambda leaf: leaf[0], uneven_parameters(config)["layers"])
    names = ("feed_forward_norm", "router", "experts", "shared_experts")
    own = {name: layer[name] for name in names if name in layer}
    x, segment_ids = _rows(config.hidden_size)
    columns = jnp.arange(x.shape[1], dtype=jnp.int32)

    def block(own, x):
        return moe_half(own, x, jnp.asarray(segment_ids), columns, config)

    random = np.random.default_rng(1)
    weight, weights = random.standard_normal(x.shape), random.standard_normal(len(x))

    def plain(own, x):
        rows = [_plain_row(own, row, ids, config) for row, ids in zip(x, segment_ids, strict=True)]
        return np.stack([out for out, _ in rows]), np.array([balance for _, balance in rows])

    def both(own, x):
        outputs, backward = jax.vjp(block, own, x)
        return outputs, backward((weight, weights))

    (out, balance), gradients = jax.jit(both)(own, jnp.asarray(x))
    own = jax.tree.map(np.asarray, own)
    want, want_balance = plain(own, x)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-10 * np.abs(want).max())
    np.testing.assert_allclose(balance, want_balance, rtol=1e-10)

    # Each leaf along a random direction that touches all of its elements.
    leaves, structure = jax.tree.flatten((own, x))
    for place, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = random.standard_normal(gradient.shape)
        stepped = [*leaves[:place], leaves[place] + 1e-30j * direction, *leaves[place + 1 :]]
        out, balance = plain(*jax.tree.unflatten(structure, stepped))
        slope = ((weight * out).sum() + weights @ balance).imag / 1e-30
        terms = np.asarray(gradient) * direction
        assert abs(terms.sum() - slope) <= 1e-10 * np.abs(terms).sum()


def _plain_row(own, x, segment_ids, config):
    scale = own["feed_forward_norm"]["scale"]
    normed = x / np.sqrt((x * x).mean(1, keepdims=True) + config.rms_norm_eps) * scale
    return plain_mixture(own, normed, segment_ids, config)


def test_of_equal_logits_the_lower_numbers_win():
    config = moe_model(num_experts=5, num_experts_per_tok=3)
    logits = jnp.asarray([[1.0, 2, 1, 2, 1], [0, 0, 0, 0, 0], [-9, -9, 0, -9, -9]])
    routing = nnx.merge(nnx.graphdef(Router(config)), {"kernel": jnp.eye(5)}).route(logits[None])
    np.testing.assert_array_equal(routing.experts[0], [[1, 3, 0], [0, 1, 2], [2, 0, 1]])
    np.testing.assert_allclose(routing.gates[0, 1], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(routing.gates.sum(-1), 1, rtol=1e-6)


def test_the_router_is_wide_whatever_it_reads():
    # Two logits that differ by less than bfloat16 can hold, and are products of exact numbers.
    x = jnp.asarray([[[1.0, 2.0**-12]]], jnp.bfloat16)
    kernel = jnp.asarray([[1.0, 1.0], [0.0, 1.0]], jnp.bfloat16)
    for normalized in (True, False):
        config = moe_model(num_experts=2, num_experts_per_tok=1, norm_topk_prob=normalized)
        routing = nnx.merge(nnx.graphdef(Router(config)), {"kernel": kernel}).route(x)
        assert routing.experts.item() == 1
        assert routing.gates.dtype == routing.probabilities.dtype == jnp.float32
    np.testing.assert_allclose(routing.gates.item(), 1 / (1 + np.exp(-(2.0**-12))), rtol=1e-6)


def test_an_expert_takes_the_first_tokens_of_each_row():
    config = moe_model(num_experts=2, num_experts_per_tok=1, capacity_factor=0.5)
    experts = jnp.asarray([[0, 1, 0, 0, 1, 1, 1, 0], [2, 1, 1, 1, 1, 1, 1, 0]], jnp.int32)[
        ..., None
    ]
    kept = drop(experts, jnp.arange(8, dtype=jnp.int32), config, SINGLE_DEVICE)
    assert expert_capacity(8, config) == 2
    np.testing.assert_array_equal(
        kept[..., 0], [[0, 1, 0, 2, 1, 2, 2, 2], [2, 1, 1, 2, 2, 2, 2, 0]]
    )


@pytest.mark.parametrize(
    ("factor", "sequence", "capacity"),
    [(1.1, 40, 11), (1.0, 41, 11), (1.25, 4096, 1280), (9.0, 40, 40), (0.01, 40, 1), (None, 7, 7)],
)
def test_capacity_is_rounded_up_and_at_most_the_row(factor, sequence, capacity):
    config = moe_model(num_experts=8, num_experts_per_tok=2, capacity_factor=factor)
    assert expert_capacity(sequence, config) == capacity


def test_balance_is_one_when_even_and_does_not_see_padding_or_other_rows():
    even = jnp.asarray([[0, 1, 2, 3], [0, 0, 0, 0]], jnp.int32)[..., None]
    probabilities = jnp.stack([jnp.full((4, 4), 0.25), jnp.eye(4)[jnp.zeros(4, int)]])
    log_sums = jnp.asarray([[1, 2, 3, 4], [5, 5, 5, 5]], jnp.float32)
    routing = Routing(even, jnp.ones(even.shape), probabilities, log_sums)
    made = auxiliary_losses(routing, None, SINGLE_DEVICE, z_loss=True)
    np.testing.assert_allclose(made, [[1, 4], [7.5, 25]])
    real = jnp.asarray([[1, 1, 0, 0], [0, 0, 0, 0]], bool)
    made = auxiliary_losses(routing, real, SINGLE_DEVICE, z_loss=True)
    np.testing.assert_allclose(made, [[1, 0], [2.5, 0]])

    config = moe_model(num_experts=4, num_experts_per_tok=1, router_aux_loss_coef=0.1)
    losses = AuxLosses(jnp.asarray([1.0, 4.0]), None).weighted(config)
    targets = jnp.asarray([[1, 1, 1, 0], [1, 0, 0, 0]], jnp.float32)
    weighted = weighted_aux_loss(losses, targets)
    np.testing.assert_allclose(weighted, 0.1 * (3 * 1 + 1 * 4), rtol=1e-6)


def test_published_counts():
    mixtral = ModelConfig.load("mixtral-8x7b")
    assert parameter_count(mixtral) == 46_702_792_704
    assert active_parameter_count(mixtral) == 12_879_925_248  # "uses 13B", as its report says
    # Six times what a token multiplies with, and attention.
    multiplied = 12_879_925_248 - 32000 * 4096 - 65 * 4096
    assert model_flops(mixtral, 4096) == 6 * multiplied + 12 * 32 * 4096 * 4096

    deepseek = ModelConfig.load("deepseekmoe-16b")
    assert parameter_count(deepseek) == 16_375_728_128
    assert active_parameter_count(deepseek) == pytest.approx(2.8e9, abs=0.05e9)
    for preset, total, active in (
        ("deepseek-v3-671b", 671_026_419_200, 37_552_297_472),
        ("kimi-k2-1t", 1_026_408_232_448, 32_861_500_928),
    ):
        assert parameter_count(ModelConfig.load(preset)) == total
        assert active_parameter_count(ModelConfig.load(preset)) == active
    assert active_parameter_count(ModelConfig.load("llama2-7b")) == 6_738_415_616
