"""Windows, capped scores and sinks: by hand, in blocks, and over the ranks of `context`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from spread_rows import arrays, assert_equal, documents, in_rank_order, in_row_order

from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.models.attention import attention, blocked
from geojax.models.parallel.parallelism import Parallelism

HEADS = 4
SINKS = np.linspace(-1.0, 2.0, HEADS)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["unrolled", "scanned"])
def walk(request, monkeypatch):
    """Both ways through the tiles, with tiles so small that there are several."""
    monkeypatch.setattr(blocked, "UNROLLED_BLOCK", 8)
    monkeypatch.setattr(blocked, "SCANNED_BLOCK", 8)
    longest = 1024 if request.param == "unrolled" else 0
    monkeypatch.setattr(blocked, "LONGEST_UNROLLED", longest)


def output_and_gradients(query, key, value, cotangent, segment_ids, sinks, **options):
    """Attention and the gradients of query, key, value and sinks."""

    def attend(query, key, value, sinks):
        return attention(query, key, value, segment_ids, sinks=sinks, **options)

    output, backward = jax.vjp(attend, query, key, value, sinks)
    return (output, *backward(cotangent))


def by_hand(query, key, value, segment_ids, *, window, softcap):
    """One output at a time, in numpy."""
    query, key, value = (np.asarray(x) for x in (query, key, value))
    output = np.zeros_like(query)
    share = query.shape[2] // key.shape[2]
    for row, position, head in np.ndindex(query.shape[:3]):
        near = range(max(0, position - window + 1), position + 1)
        seen = [p for p in near if segment_ids[row, p] == segment_ids[row, position]]
        scores = key[row, seen, head // share] @ query[row, position, head]
        scores = softcap * np.tanh(scores / np.sqrt(query.shape[3]) / softcap)
        weights = np.exp(scores)
        total = weights.sum() + np.exp(SINKS[head])
        output[row, position, head] = weights / total @ value[row, seen, head // share]
    return output


def test_the_reference_is_the_definition():
    query, key, value, _ = arrays(2, 13, HEADS, 2)
    segment_ids = documents(2, 13)
    options = {"window": 4, "softcap": 1.5}
    actual = attention(
        query, key, value, segment_ids, implementation="reference", sinks=SINKS, **options
    )
    expected = by_hand(query, key, value, segment_ids, **options)
    np.testing.assert_allclose(actual, expected, atol=1e-13)


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("window", [1, 5, 8, 9, 30, 60])
@pytest.mark.parametrize("is_windowed", [None, True, False])
def test_blocks_equal_the_reference_with_gradients(window, is_windowed):
    operands = [*arrays(2, 43, HEADS, 2), documents(2, 43), jnp.asarray(SINKS)]
    options = {"window": window, "softcap": 2.0}

    @jax.jit
    def results(applies):
        return [
            output_and_gradients(*operands, implementation=name, is_windowed=applies, **options)
            for name in ("reference", "blocked")
        ]

    applies = None if is_windowed is None else jnp.asarray(is_windowed)
    expected, actual = results(applies)
    assert_equal(actual, expected, 1e-12)


@pytest.mark.parametrize(("method", "window", "is_windowed"), [("all_gather", 20, True)])
def test_ranks_of_context_equal_one_device(monkeypatch, method, window, is_windowed):
    monkeypatch.setattr(blocked, "LONGEST_UNROLLED", 4)
    monkeypatch.setattr(blocked, "SCANNED_BLOCK", 5)
    applies = None if is_windowed is None else jnp.asarray(is_windowed)
    options = {"window": window, "softcap": 2.0, "is_windowed": applies}
    operands = [*arrays(2, 64, HEADS, 2), documents(2, 64)]
    expected = output_and_gradients(
        *operands, jnp.asarray(SINKS), implementation="reference", **options
    )
    parallelism = Parallelism(context=2, tensor=2, context_method=method)
    mesh = make_mesh(context=2, tensor=2, devices=jax.devices()[:4])
    rows, heads = PartitionSpec(None, "context", "tensor"), PartitionSpec("tensor")
    program = jax.shard_map(
        lambda *x: output_and_gradients(*x, parallelism=parallelism, **options),
        mesh=mesh,
        in_specs=(rows, rows, rows, rows, PartitionSpec(None, "context"), heads),
        out_specs=(*(rows,) * 4, heads),
        check_vma=True,
    )
    found = jax.jit(program)(*in_rank_order(parallelism, operands), jnp.asarray(SINKS))
    actual = [*in_row_order(parallelism, found[:4]), found[4]]
    assert_equal(actual, expected, 1e-11)


@pytest.mark.parametrize("is_windowed", [None, True])
def test_tiles_outside_of_a_window_are_not_visited(monkeypatch, is_windowed):
    """A NaN among keys that no query sees would show in every tile that holds it."""
    monkeypatch.setattr(blocked, "LONGEST_UNROLLED", 4)
    monkeypatch.setattr(blocked, "SCANNED_BLOCK", 8)
    query, key, value, _ = arrays(1, 64, HEADS, 2)
    applies = None if is_windowed is None else jnp.asarray(is_windowed)
    options = {"window": 9, "is_windowed": applies, "implementation": "blocked"}
    expected = attention(query, key, value, **options)
    value = value.at[:, :16].set(jnp.nan)
    actual = attention(query, key, value, **options)
    np.testing.assert_array_equal(actual[:, 32:], expected[:, 32:])


def test_a_window_is_no_task_for_a_ring():
    x = jnp.zeros((1, 16, HEADS, 8))
    mesh = make_mesh(context=2, devices=jax.devices()[:2])
    spec = PartitionSpec(None, "context")
    ring = Parallelism(context=2, context_method="ring")
    program = jax.shard_map(
        lambda x: attention(x, x, x, window=4, parallelism=ring),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    with pytest.raises(UserError, match=r"window of 4 .* all_gather and ulysses would work"):
        jax.eval_shape(program, x)
