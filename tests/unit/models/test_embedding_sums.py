"""Gradients of the embedding that are added to sums: in place, and of nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import FAMILIES, drawn_parameters, make_batch, model_of

from geojax.models.context import ON_ONE_DEVICE
from geojax.models.transformer import model_chunk


def functions_of(model):
    chunk = model_chunk(
        model, range(3), np.dtype(np.float32), ON_ONE_DEVICE, dropout_key=None, remat="none"
    )
    return chunk.functions


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_get_the_gradients_of_the_embedding(family):
    model = model_of(family)
    functions, batch = functions_of(model), make_batch(model)
    first = drawn_parameters(model)["embedding"]
    stream, residuals = functions.embed_forward(first, batch)
    cotangent = jnp.cos(jnp.arange(stream.size, dtype=stream.dtype)).reshape(stream.shape)
    gradients = functions.embed_gradients(first, residuals, cotangent, batch)
    sums = jax.tree.map(lambda leaf: leaf + jnp.sin(leaf), first)
    made = functions.embed_sums(first, batch, cotangent, sums)
    for got, before, added in zip(*map(jax.tree.leaves, (made, sums, gradients)), strict=True):
        np.testing.assert_allclose(got, before + added, rtol=1e-5, atol=1e-6)


def test_no_second_table_is_made():
    model = model_of("llama")
    functions, batch = functions_of(model), make_batch(model)
    first = drawn_parameters(model)["embedding"]
    stream = jax.eval_shape(functions.embed, first, batch)
    add = jax.jit(functools.partial(functions.embed_sums, first, batch), donate_argnums=1)
    text = add.lower(stream, first).as_text()
    (table,) = (leaf.shape for leaf in jax.tree.leaves(first))
    of_table = [line for line in text.splitlines() if "x".join(map(str, table)) in line]
    assert text.count('"stablehlo.scatter"') == 1
    others = ("stablehlo.add", "stablehlo.broadcast_in_dim", "stablehlo.convert")
    assert [line for line in of_table if any(name in line for name in others)] == []
