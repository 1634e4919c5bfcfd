import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spread_rows import (
    arrays,
    assert_equal,
    documents,
    in_rank_order,
    in_row_order,
    output_and_gradients,
    spread,
)

from geojax.hlo import collective_traffic
from geojax.models.attention import blocked
from geojax.models.parallel.parallelism import Parallelism
from geojax.planner.traffic.context import predicted_context_bytes

METHODS = ["ring", "all_gather", "ulysses"]


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """Rows longer than what is unrolled, many tiles to a chunk, the last one padded."""
    monkeypatch.setattr(blocked, "LONGEST_UNROLLED", 4)
    monkeypatch.setattr(blocked, "SCANNED_BLOCK", 5)


def check(parallelism, operands, *, data=1, implementation="blocked"):
    """Output and gradients equal those of whole rows; the program sends what the formula says."""
    packed = operands[4] is not None
    mesh, program = spread(parallelism, data=data, packed=packed)
    lowered = program.lower(*in_rank_order(parallelism, operands))
    compiled = lowered.compile()
    actual = in_row_order(parallelism, compiled(*in_rank_order(parallelism, operands)))
    whole = jax.jit(lambda *x: output_and_gradients(*x, implementation=implementation))
    assert_equal(actual, whole(*operands), 1e-10)
    rows, length, heads, size = operands[0].shape
    sent = predicted_context_bytes(
        parallelism,
        sequences=rows // data,
        sequence_length=length,
        heads=heads // parallelism.tensor,
        kv_heads=operands[1].shape[2] // parallelism.tensor,
        head_dim=size,
        value_dim=size,
        dtype=operands[0].dtype,
        packed=packed,
    )
    # In a ring of two both directions are one, and the compiler makes one transfer of two.
    merged = parallelism.context_method == "ring" and parallelism.context == 2
    for program in (lowered,) if merged else (lowered, compiled):
        traffic = collective_traffic(program, mesh)
        assert traffic.bytes_over("context") == sent.forward + sent.backward
        assert {collective.axes for collective in traffic.collectives} == {("context",)}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("context", "data", "tensor"), [(2, 2, 2), (4, 2, 1), (8, 1, 1)])
def test_shared_rows_equal_whole_rows(method, context, data, tensor):
    parallelism = Parallelism(tensor=tensor, context=context, context_method=method)
    operands = [*arrays(2 * data, 64, heads=8, key_heads=2), documents(2 * data, 64)]
    check(parallelism, operands, data=data)


@pytest.mark.usefixtures("float64", "small_tiles")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("context", "packed"), [(4, True), (2, False)])
def test_chunks_of_many_tiles(method, context, packed):
    length = 13 * 2 * context
    operands = [*arrays(2, length, heads=4, key_heads=4), documents(2, length) if packed else None]
    parallelism = Parallelism(context=context, context_method=method)
    check(parallelism, operands, implementation="reference")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("key_heads", [1, 6])
def test_ulysses_repeats_the_key_heads_that_several_ranks_need(key_heads):
    operands = [*arrays(1, 32, heads=12, key_heads=key_heads), documents(1, 32)]
    check(Parallelism(context=4, context_method="ulysses"), operands)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_summed_in_float32(method):
    """With two key heads for four ranks, every method sums gradients of several ranks."""
    parallelism = Parallelism(context=4, context_method=method)
    operands = arrays(1, 64, heads=4, key_heads=2, dtype=np.float32)
    narrow = [x.astype(jnp.bfloat16) for x in operands]
    _, program = spread(parallelism, packed=False)
    actual = in_row_order(parallelism, program(*in_rank_order(parallelism, [*narrow, None])))
    wide = [x.astype(jnp.float32) for x in narrow]
    expected = output_and_gradients(*wide, None, implementation="reference")
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        # Two roundings to 8 bits, of the probabilities and of the result, of numbers up to ~3.
        np.testing.assert_allclose(one.astype(np.float32), other, rtol=2**-7, atol=2**-6)
