"""TransformerEngine multiplies as the reference does, is found or missed with a reason."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engine import for_hopper, in_plain_jax, needs_transformer_engine

from geojax.errors import UserError
from geojax.precision import RECIPES, LinearMatmul, chosen_backend, largest_each, transformer_engine

TOKENS, INPUTS, OUTPUTS = 256, 192, 128
# Of y, dx and dw: what rounding both operands costs, see test_recipes.
RECIPE_ERRORS = (0.037, 0.059, 0.059)


def product_and_gradients(x, w, dy, backend, name, amax):
    matmul = LinearMatmul(RECIPES[name], backend)
    y, backward = jax.vjp(lambda *operands: matmul.multiply(*operands), x, w, amax)
    return y, *backward(dy)


def relative(made, expected):
    made, expected = (np.asarray(leaf, np.float64) for leaf in (made, expected))
    return np.linalg.norm(made - expected) / np.linalg.norm(expected)


@needs_transformer_engine
@pytest.mark.parametrize(
    ("name", "expected_share"), [("delayed", 1.0), ("delayed", 0.1), ("current", None)]
)
def test_product_gradients_and_what_was_seen_are_those_of_the_reference(
    monkeypatch, name, expected_share
):
    for_hopper(monkeypatch)
    in_plain_jax(monkeypatch)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (TOKENS, INPUTS), jnp.bfloat16)
    w = jax.random.normal(keys[1], (INPUTS, OUTPUTS), jnp.bfloat16) / 16
    dy = jax.random.normal(keys[2], (TOKENS, OUTPUTS), jnp.bfloat16) * 1e-4
    # Where a tenth of them is expected, many numbers are clipped.
    amax = None if expected_share is None else expected_share * largest_each(x, w, dy)
    made, expected = (
        jax.jit(product_and_gradients, static_argnums=(3, 4))(x, w, dy, backend, name, amax)
        for backend in ("transformer_engine", "reference")
    )
    assert [leaf.dtype for leaf in made[:3]] == [jnp.bfloat16] * 3
    for leaf, wanted, error in zip(made[:3], expected[:3], RECIPE_ERRORS, strict=True):
        assert relative(leaf, wanted) < error / 3, "bfloat16 sums, of the same FP8 numbers"
    if amax is not None:
        np.testing.assert_array_equal(made[3], expected[3])


@needs_transformer_engine
def test_numbers_are_rounded_to_the_same_fp8_and_nothing_is_a_tensor_too(monkeypatch):
    for_hopper(monkeypatch)
    in_plain_jax(monkeypatch)
    x = jax.random.normal(jax.random.key(0), (TOKENS, TOKENS), jnp.float32)
    one = jnp.eye(TOKENS, dtype=jnp.float32)
    made, expected = (
        LinearMatmul(RECIPES["current"], backend).multiply(x, one)
        for backend in ("transformer_engine", "reference")
    )
    # Of a product with 1 every sum has one term, which is an FP8 number times two scales.
    np.testing.assert_allclose(made, expected, rtol=1e-6)
    nothing = LinearMatmul(RECIPES["current"], "transformer_engine").multiply(0 * x, one)
    np.testing.assert_array_equal(nothing, 0 * x)


@needs_transformer_engine
def test_sizes_that_do_not_fit_are_refused_in_one_line(monkeypatch):
    for_hopper(monkeypatch)
    matmul = LinearMatmul(RECIPES["current"], "transformer_engine")
    with pytest.raises(UserError, match=r"multiples of 16; got \[20, 32\]"):
        matmul.multiply(jnp.ones((20, 32), jnp.bfloat16), jnp.ones((32, 16), jnp.bfloat16))


def engine(asked):
    """A package that can be imported, and what it says when it is asked about the GPU."""
    quantizers = types.SimpleNamespace(
        ScalingMode=types.SimpleNamespace(DELAYED_TENSOR_SCALING=1),
        is_scaling_mode_supported=lambda mode: asked(),
    )
    return lambda: transformer_engine._Engine(None, quantizers)


def missing(error):
    def raised():
        raise error

    return raised


NO_PACKAGE = missing(ModuleNotFoundError("No module named 'transformer_engine'"))
NO_LIBRARY = missing(OSError("libcudnn.so.9: cannot open shared object file\nand more"))
NO_COMPILER = missing(RuntimeError("nvrtc shared object not found."))
NO_GPU = engine(missing(RuntimeError("CUDA Error: no CUDA-capable device is detected")))
OLD_GPU = engine(lambda: (False, "Device compute capability 8.9 or higher required"))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (NO_PACKAGE, r"cannot be imported \(No module named 'transformer_engine'\)"),
        (NO_LIBRARY, r"cannot be imported \(libcudnn.so.9: cannot open shared object file\)"),
        (NO_COMPILER, r"cannot be imported \(nvrtc shared object not found.\)"),
        (NO_GPU, r"finds no GPU \(CUDA Error: no CUDA-capable device is detected\)"),
        (OLD_GPU, r"refuses the GPU \(Device compute capability 8.9 or higher required\)"),
    ],
)
def test_where_it_cannot_run_xla_does_and_asking_for_it_says_what_is_missing(
    monkeypatch, found, why
):
    monkeypatch.setattr(transformer_engine, "_engine", found)
    choice = chosen_backend(RECIPES["current"], "cuda")
    assert choice.name == "xla"
    with pytest.raises(UserError, match=f"TransformerEngine {why}; use xla$") as refused:
        chosen_backend(RECIPES["current"], "cuda", "transformer_engine")
    because = str(refused.value).split("since ")[1].removesuffix("; use xla")
    assert choice.reason.endswith(f"through XLA, since {because}")


def test_where_it_can_run_it_does_for_recipes_with_a_scale_per_tensor(monkeypatch):
    monkeypatch.setattr(transformer_engine, "_engine", engine(lambda: (True, "")))
    for name in ("delayed", "current"):
        assert chosen_backend(RECIPES[name], "gpu").name == "transformer_engine"
        assert chosen_backend(RECIPES[name], "gpu", "xla").name == "xla"
        assert chosen_backend(RECIPES[name], "cpu").name == "reference"
    assert chosen_backend(RECIPES["block"], "gpu").name == "reference"
    with pytest.raises(UserError, match=r"'block' .* TransformerEngine mul.* own; use reference"):
        chosen_backend(RECIPES["block"], "gpu", "transformer_engine")
    with pytest.raises(UserError, match="GPUs and this is cpu; use reference"):
        chosen_backend(RECIPES["current"], "cpu", "transformer_engine")
