import pytest

from geojax.accelerators import accelerator_named
from geojax.errors import UserError
from geojax.planner.cost.matmul import LAUNCH_SECONDS, MatmulRate, matmul_rate

H100 = MatmulRate(600e12, 3e12, 132, 2)


def flops_per_second(rows, columns, inner):
    return 2 * rows * columns * inner / H100.seconds(rows, columns, inner)


def test_a_large_product_reaches_the_rate():
    assert flops_per_second(2**15, 132 * 256, 2**14) == pytest.approx(600e12, rel=0.02)


def test_one_tile_more_than_a_wave_takes_another_wave():
    wave = H100.seconds(11 * 256, 12 * 128, 8192)
    more = H100.seconds(11 * 256 + 1, 12 * 128, 8192)
    assert 1.35 * wave < more < 1.7 * wave, "smaller tiles save a part of the second wave"
    assert H100.seconds(22 * 256, 12 * 128, 8192) == pytest.approx(2 * wave, rel=0.05)


def test_few_rows_take_the_time_to_read_the_weights():
    read = 2 * 8192 * 8192 / 3e12
    assert H100.seconds(8, 8192, 8192) == pytest.approx(read + LAUNCH_SECONDS, rel=0.01)


def test_a_short_inner_dim_is_slower():
    assert flops_per_second(8192, 8192, 256) < 0.92 * flops_per_second(8192, 8192, 8192)


def test_float8_moves_half_the_bytes_at_twice_the_peak():
    h100 = accelerator_named("h100-sxm")
    narrow, wide = (matmul_rate(h100, dtype, 0.5, 1.0) for dtype in ("float8", "bfloat16"))
    assert narrow.flops_per_second == pytest.approx(2 * wide.flops_per_second, rel=0.01)
    assert (narrow.itemsize, wide.itemsize) == (1, 2)


def test_an_unknown_peak_is_named():
    with pytest.raises(UserError, match="float8 peak of accelerator 'a100-sxm-80gb'"):
        matmul_rate(accelerator_named("a100-sxm-80gb"), "float8", 0.5, 1.0)
