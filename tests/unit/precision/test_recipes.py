"""FP8 recipes: the errors of a matrix product and its two gradients, and who makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.recipe_errors import (
    INPUTS,
    TOKENS,
    errors,
    operands,
    product_and_gradients,
    with_outliers,
    without_outliers,
)

from geojax.errors import UserError
from geojax.precision import (
    NO_FP8,
    RECIPES,
    LinearMatmul,
    chosen_backend,
    policy,
    quantize,
    transformer_engine,
)


def test_errors_are_those_of_the_formats():
    findings = without_outliers()
    assert len(findings) == len(RECIPES) * 3
    for finding in findings:
        assert finding.fits, finding


def test_small_blocks_keep_outliers_to_themselves_and_old_scales_do_not_know_them():
    findings = with_outliers()
    for finding in findings:
        assert finding.fits, finding
    error = {(finding.case, finding.measure): finding.error for finding in findings}
    for product, row in (("y", "typical token"), ("dw", "typical channel")):
        rest, whole = f"{product}, {row}", f"{product}, all"
        after_spike = error["delayed, as after a larger spike", rest]
        for name in ("block", "mxfp8"):
            assert 2 * error[name, rest] < error["current", rest] < after_spike / 2
        assert 2 * error["current", whole] < error["delayed, as before the outliers", whole]


def test_what_is_stored_is_float8_and_what_is_multiplied_is_exact():
    x, *_ = operands()
    for each in (RECIPES["current"], RECIPES["block"], RECIPES["mxfp8"]):
        for form in {each.activation, each.gradient}:
            made = quantize(x, form, 1)
            assert made.values.dtype == form.dtype
            assert made.scales.dtype == form.scale_dtype
            with jax.enable_x64(True):
                assert jnp.array_equal(made.dequantize(jnp.float32), made.dequantize(jnp.float64))
    assert quantize(x, RECIPES["mxfp8"].weight, 0).scales.shape == (TOKENS // 32, INPUTS)
    assert quantize(x, RECIPES["block"].activation, 1).scales.shape == (TOKENS, INPUTS // 128)
    assert quantize(x, RECIPES["block"].weight, 1).scales.shape == (TOKENS // 128, INPUTS // 128)
    assert RECIPES["mxfp8"].weight.scale_dtype == jnp.float8_e8m0fnu


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_the_largest_number_does_not_saturate_and_infinity_does_not_hide(name):
    form = RECIPES[name].activation
    for largest in (1e-30, 1.0, 447.0, 449.0, 3e38):
        x = jnp.asarray([[largest, -largest / 2, 0.0]])
        rounded = quantize(x, form, 1).dequantize(jnp.float32)
        np.testing.assert_allclose(rounded, x, rtol=1 / 16)
    assert jnp.array_equal(
        quantize(jnp.zeros((2, 3)), form, 1).dequantize(jnp.float32), jnp.zeros((2, 3))
    )
    for bad in (jnp.inf, jnp.nan):
        x = jnp.asarray([[1.0, bad]])
        assert jnp.isnan(quantize(x, form, 1).dequantize(jnp.float32)).all()


def test_a_history_is_read_and_what_was_seen_comes_back_as_its_gradient():
    x, w, dy = operands()
    matmul = LinearMatmul(RECIPES["delayed"])
    expected = 2.0 ** jnp.arange(1, 4, dtype=jnp.float32)

    def multiply(x, w, amax):
        return matmul.multiply(x, w, amax)

    y, backward = jax.vjp(multiply, x, w, expected)
    seen = backward(dy)[2]
    np.testing.assert_array_equal(seen, [jnp.abs(leaf).max() for leaf in (x, w, dy)])
    clipped = quantize(x, RECIPES["delayed"].activation, 1, expected[0]).dequantize(jnp.float32)
    assert jnp.abs(clipped).max() <= 2 < jnp.abs(x).max()
    rounded = quantize(w, RECIPES["delayed"].weight, 0, expected[1]).dequantize(jnp.float32)
    np.testing.assert_allclose(y, clipped @ rounded, rtol=1e-5, atol=1e-5)


def test_a_layer_at_an_end_multiplies_in_the_compute_dtype():
    x, w, dy = operands()
    matmul = LinearMatmul(RECIPES["current"])
    assert [count for count, _ in matmul.spans(6)] == [1, 4, 1]
    assert [own.recipe for _, own in matmul.spans(2)] == [None, None]
    assert [own.recipe for _, own in LinearMatmul(RECIPES["block"]).spans(2)] == [RECIPES["block"]]
    for index in range(3):
        own = matmul.at_layer(jnp.int32(index), 3)
        same = NO_FP8 if index != 1 else matmul
        made = product_and_gradients(x, w, dy, own)
        for leaf, expected in zip(made, product_and_gradients(x, w, dy, same), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(UserError, match="is called 'fp8-curent'; did you mean 'fp8-current'"):
        policy("fp8-curent")
    with pytest.raises(UserError, match="on NVIDIA GPUs and this is cpu; use reference"):
        chosen_backend(RECIPES["current"], "cpu", "xla")
    with pytest.raises(UserError, match="'block' cannot run on backend xla, since XLA mult"):
        chosen_backend(RECIPES["block"], "cuda", "xla")


def test_the_backend_is_chosen_for_the_platform_with_a_reason(monkeypatch):
    monkeypatch.setattr(transformer_engine, "unsupported_reason", lambda: "it is not here")
    for platform, name, expected in (
        ("cuda", "delayed", "xla"),
        ("cuda", "current", "xla"),
        ("cuda", "mxfp8", "reference"),
        ("cpu", "current", "reference"),
    ):
        choice = chosen_backend(RECIPES[name], platform)
        assert choice.name == expected
        assert name in choice.reason
    assert chosen_backend(RECIPES["current"], "cuda", "reference").name == "reference"


def test_what_xla_is_asked_for_is_the_reference_but_for_the_dtype():
    bf16 = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), operands())
    made, expected = (
        product_and_gradients(*bf16, LinearMatmul(RECIPES["current"], backend))
        for backend in ("xla", "reference")
    )
    assert {leaf.dtype for leaf in (*made, *expected)} == {jnp.dtype(jnp.bfloat16)}
    for error in errors(made, expected)[0]:
        assert error < 2**-7, "FP8 numbers times a scale, rounded once more where XLA runs on a CPU"
