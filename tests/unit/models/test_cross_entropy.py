"""The chunked head and loss against the textbook, whatever the chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import geojax
from geojax.models import head
from geojax.models.head import cross_entropy_sum
from geojax.models.parallel.parallelism import Parallelism


def _inputs(dtype, tied, tokens=(3, 11), hidden=6, vocabulary=17):
    random = np.random.default_rng(0)
    states = jnp.asarray(random.standard_normal((*tokens, hidden)), dtype)
    kernel = jnp.asarray(random.standard_normal((hidden, vocabulary)), dtype)
    targets = jnp.asarray(random.integers(0, vocabulary, tokens), jnp.int32)
    mask = jnp.asarray(random.choice([0, 0.5, 1], tokens), jnp.promote_types(dtype, jnp.float32))
    return states, kernel.T if tied else kernel, targets, mask


def _textbook(states, kernel, targets, mask, tied, softcap=None, z_loss=0.0):
    logits = states @ (kernel.T if tied else kernel)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.sum(mask * (z - chosen + z_loss * z**2))


@pytest.fixture(params=[1, 5, 33, 1000], ids="chunks_of_{}".format)
def chunk_tokens(request, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", 1)
    monkeypatch.setattr(head, "LEAST_CHUNK_TOKENS", request.param)


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "z_loss": 0.2}], ids=["plain", "all"])
@pytest.mark.parametrize("tied", [False, True])
def test_value_and_gradients(tied, options, chunk_tokens, x64):
    states, kernel, targets, mask = _inputs(jnp.float64, tied)

    def both(function):
        def weighted(states, kernel, mask):
            return 0.7 * function(states, kernel, targets, mask)

        return jax.value_and_grad(weighted, argnums=(0, 1, 2))(states, kernel, mask)

    got = both(lambda *given: cross_entropy_sum(*given, tied=tied, **options))
    want = both(lambda *given: _textbook(*given, tied, **options))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), got, want)
    # Without differentiation a leaner program runs.
    alone = cross_entropy_sum(states, kernel, targets, mask, tied=tied, **options)
    np.testing.assert_allclose(0.7 * alone, want[0], rtol=1e-12)


def test_masked_tokens_may_be_anything():
    states, kernel, targets, mask = _inputs(jnp.float32, tied=False)
    mask = mask.at[1].set(0)
    clean = jax.value_and_grad(cross_entropy_sum, argnums=(0, 1))(states, kernel, targets, mask)
    states = states.at[1].set(jnp.nan).at[1, 3].set(jnp.inf)
    got = jax.value_and_grad(cross_entropy_sum, argnums=(0, 1))(states, kernel, targets, mask)
    jax.tree.map(np.testing.assert_array_equal, got, clean)


def test_bfloat16_loses_only_the_inputs_rounding():
    states, kernel, targets, mask = _inputs(jnp.bfloat16, tied=False, tokens=(40,))
    wide = states.astype(jnp.float32), kernel.astype(jnp.float32)
    got = cross_entropy_sum(states, kernel, targets, mask)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, _textbook(*wide, targets, mask, False), rtol=1e-6)


def test_no_second_copy_of_the_logits():
    tokens, hidden, vocabulary = 2048, 64, 4096
    states, kernel, targets, mask = _inputs(jnp.float32, False, (tokens,), hidden, vocabulary)
    step = jax.jit(jax.grad(cross_entropy_sum, argnums=(0, 1)))
    logits = 4 * tokens * vocabulary
    kernel_gradient = 4 * hidden * vocabulary

    def temporaries():
        compiled = step.lower(states, kernel, targets, mask).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries() < 1.2 * logits + 2 * kernel_gradient


def test_chunks_bound_the_memory(monkeypatch):
    states, kernel, targets, mask = _inputs(jnp.float32, False, (8192,), 16, 4096)
    monkeypatch.setattr(head, "CHUNK_BYTES", 1024 * 4096 * 4)
    step = jax.jit(jax.grad(cross_entropy_sum, argnums=(0, 1)))
    compiled = step.lower(states, kernel, targets, mask).compile()
    logits = 4 * 8192 * 4096
    assert compiled.memory_analysis().temp_size_in_bytes < logits / 4


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_that_share_the_vocabulary(tied, monkeypatch, x64):
    # 17 columns on 8 ranks: the sixth has 2, the others 3 or none. Chunks of 5 tokens.
    monkeypatch.setattr(head, "CHUNK_BYTES", 1)
    monkeypatch.setattr(head, "LEAST_CHUNK_TOKENS", 5)
    states, kernel, targets, mask = _inputs(jnp.float64, tied)
    mask = mask.at[1].set(0)
    side = 0 if tied else 1
    want = jax.value_and_grad(
        lambda *given: _textbook(*given[:2], targets, given[2], tied), argnums=(0, 1, 2)
    )(states, kernel, mask)
    # What is masked may be anything, also what pads the vocabulary.
    states = states.at[1].set(jnp.inf)
    widths = [(0, 0), (0, 0)]
    widths[side] = (0, 7)
    padded = jnp.pad(kernel, widths, constant_values=3.0)

    def share(states, kernel, mask):
        def loss(states, kernel, mask):
            entered = jax.lax.pcast(states, "tensor", to="varying")
            return cross_entropy_sum(
                entered,
                kernel,
                targets,
                mask,
                tied=tied,
                vocabulary=17,
                parallelism=Parallelism(tensor=8),
            )

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(states, kernel, mask)

    cut = PartitionSpec("tensor") if tied else PartitionSpec(None, "tensor")
    whole = PartitionSpec()
    sharded = jax.shard_map(
        share,
        mesh=geojax.make_mesh(tensor=8),
        in_specs=(whole, cut, whole),
        out_specs=(whole, (whole, cut, whole)),
    )
    loss, (of_states, of_kernel, of_mask) = jax.jit(sharded)(states, padded, mask)
    np.testing.assert_allclose(loss, want[0], rtol=1e-12)
    np.testing.assert_allclose(of_states, want[1][0], rtol=1e-12, atol=1e-12)
    own, padding = jnp.split(of_kernel, [17], axis=side)
    np.testing.assert_allclose(own, want[1][1], rtol=1e-12, atol=1e-12)
    assert not padding.any()
    counts = np.asarray(mask) != 0
    np.testing.assert_allclose(of_mask[counts], want[1][2][counts], rtol=1e-12)
