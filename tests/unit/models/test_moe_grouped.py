"""Products by groups: the blocks, the loops, and the kernels for GPUs in their interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import mosaic_gpu

from geojax.models.moe import grouped_matmul, grouped_matmul_loops, grouped_matmul_mosaic
from geojax.models.moe.grouped_matmul import block_rows, grouped_product, lay_out
from geojax.runtime.platform import GPU


def _assigned(count, experts, seed=0):
    """Most to the first expert, none to the second, a tenth to nobody."""
    random = np.random.default_rng(seed)
    assigned = random.integers(0, 2 * experts, count)
    assigned = np.where((assigned >= experts) | (assigned == 1), 0, assigned)
    return jnp.asarray(np.where(random.random(count) < 0.1, experts, assigned), jnp.int32)


def _arrays(count, experts, inputs, outputs, dtype):
    assigned = _assigned(count, experts)
    blocks = lay_out(assigned, experts)
    random = np.random.default_rng(1)
    real = blocks.origins[:, None] < count
    draw = [random.standard_normal(size) for size in ((len(real), inputs), (len(real), outputs))]
    rows, cotangent = (jnp.where(real, leaf, 0).astype(dtype) for leaf in draw)
    kernels = jnp.asarray(random.standard_normal((experts, inputs, outputs)), dtype)
    return assigned, blocks, rows, cotangent, kernels


@pytest.mark.parametrize(("count", "experts"), [(500, 3), (40, 8), (3, 4), (1, 2)])
def test_every_assignment_stands_in_a_block_of_its_expert(count, experts):
    assigned = np.asarray(_assigned(count, experts))
    blocks, size = lay_out(jnp.asarray(assigned), experts), block_rows(count, experts)
    slots, origins = np.asarray(blocks.slots), np.asarray(blocks.origins)
    ends = np.asarray(blocks.ends)
    assert len(origins) % size == 0
    for assignment, expert in enumerate(assigned):
        if expert == experts:
            assert slots[assignment] == len(origins)
            continue
        assert origins[slots[assignment]] == assignment
        assert np.searchsorted(ends, slots[assignment] // size, side="right") == expert
    assert (origins < count).sum() == (assigned < experts).sum()
    needed = [-(-(assigned == expert).sum() // size) for expert in range(experts)]
    np.testing.assert_array_equal(ends, np.cumsum(needed))
    for expert in range(experts):  # in their order
        assert (np.diff(slots[assigned == expert]) == 1).all()


@pytest.mark.parametrize("widths", [(36,), (20, 16)])
def test_each_row_meets_the_kernels_of_its_expert(x64, widths):
    count, experts = 500, 3
    assigned, blocks, rows, cotangent, wide = _arrays(count, experts, 24, 36, jnp.float64)
    kernels = tuple(jnp.split(wide, np.cumsum(widths[:-1]), axis=2))
    product, backward = jax.jit(
        lambda *args: jax.vjp(lambda *both: grouped_product(*both, blocks), *args)
    )(rows, kernels)
    of_rows, of_kernels = backward(cotangent)
    assert [each.shape[2] for each in of_kernels] == [*widths]
    of_wide = np.concatenate(of_kernels, axis=2)
    origins = np.asarray(blocks.origins)
    owner = np.append(np.asarray(assigned), experts)[origins]
    for expert in range(experts):
        own = owner == expert
        np.testing.assert_allclose(product[own], rows[own] @ wide[expert], atol=1e-12)
        np.testing.assert_allclose(of_rows[own], cotangent[own] @ wide[expert].T, atol=1e-12)
        np.testing.assert_allclose(of_wide[expert], rows[own].T @ cotangent[own], atol=1e-11)
    assert not np.asarray(product)[owner == experts].any()
    assert not of_wide[1].any(), "an expert without rows has no gradient"


@pytest.mark.parametrize(
    ("count", "experts", "inputs", "outputs"),
    [(400, 3, 176, 200), (40, 3, 24, 36), (2100, 2, 64, 128)],
)
def test_the_kernels_for_gpus_give_what_the_loops_give(
    count, experts, inputs, outputs, monkeypatch
):
    # Sizes that tiles divide and that they do not; blocks of one tile and of two.
    monkeypatch.setattr(grouped_matmul, "target_platform", lambda: GPU)
    monkeypatch.setattr(grouped_matmul_mosaic, "_CORES", 3)
    _, blocks, *draws = _arrays(count, experts, inputs, outputs, jnp.float32)
    # Small whole numbers, whose sums are exact in any order.
    rows, cotangent, kernels = (jnp.round(draw).astype(jnp.bfloat16) for draw in draws)
    size = block_rows(count, experts)

    def compare(name, *operands, **options):
        want = getattr(grouped_matmul_loops, name)(size, *operands, blocks.ends, **options)
        got = getattr(grouped_matmul_mosaic, name)(
            size, *operands, blocks.ends, **options, interpret=InterpretGPUParams()
        )
        assert got.dtype == want.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, want)

    compare("multiply", rows, kernels, contracting=0)
    if not hasattr(mosaic_gpu, "InterpretGPUParams"):
        return  # the interpreter of JAX 0.10 cannot transpose
    compare("multiply", cotangent, kernels, contracting=1)
    compare("kernels_gradient", rows, cotangent, kernels)


def test_sums_are_wide(x64):
    # Of 2,100 rows: bfloat16 sums would lose a tenth of the kernels' gradient.
    _, blocks, rows, cotangent, kernels = _arrays(2100, 2, 64, 16, jnp.bfloat16)

    def results(*operands):
        out, backward = jax.vjp(lambda x, w: grouped_product(x, (w,), blocks), *operands[:2])
        return out, *backward(operands[2])

    exact = results(*(leaf.astype(jnp.float64) for leaf in (rows, kernels, cotangent)))
    for got, want in zip(results(rows, kernels, cotangent), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        assert np.abs(got - want).max() <= 2**-8 * np.abs(want).max()
