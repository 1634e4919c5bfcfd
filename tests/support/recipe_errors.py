"""What FP8 costs: relative errors of a matrix product and its two gradients, and those to expect.

**One number.** With m bits of mantissa, numbers from 2^e to 2^(e+1) are 2^(e-m) apart, so that
rounding to the nearest has an error of 2^(e-m) / sqrt(12), root mean square, and of half a distance
at most. Over a binade, 4^e / x^2 is 3 / (4 ln 4) in the mean where logarithms are spread evenly;
that is what any wide distribution looks like, and a normal one is within 1% of it wherever its
scale puts it. Together

    rounding(m) = 2^-m sqrt(3 / (4 ln 4) / 12)      2.65% in E4M3, 5.31% in E5M2

**A product.** Errors of many terms add up as their squares do, so that it has the relative error of
one term: that of the two operands, as squares. Formats are those of Micikevicius et al. 2022 ("FP8
Formats for Deep Learning", table 1).

**Outliers** of 100,000 times the rest, in one channel of a few tokens, are what Sun et al. 2024
found ("Massive Activations in Large Language Models"). One scale for a tensor that holds them
leaves the rest to the smallest numbers of E4M3, which are 2^-9 of the scale apart, whatever their
size: an absolute error of scale 2^-9 / sqrt(12). A scale from before them cuts them off, and one
from a spike a hundred times larger makes all else zero.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from geojax.precision import NO_FP8, RECIPES, Format, LinearMatmul, Recipe, largest_each

TOKENS, INPUTS, OUTPUTS = 512, 384, 256
OUTLIER, SPIKE = 1e5, 100.0
"""How much larger outliers are than the rest, and a past spike than outliers."""
OUTLIER_CHANNEL, TOKENS_APART = 7, 128
PRODUCTS = ("y", "dx", "dw")
READ = {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("x", "dy")}
MARGIN = 0.03
"""Around what is expected of many numbers: they are samples."""

SOURCES = {
    "delayed": "Micikevicius et al. 2022: E4M3, gradients E5M2",
    "current": "the same formats",
    "block": "DeepSeek-V3 report, 3.3.2: all E4M3",
    "mxfp8": "OCP MX specification 1.0: all E4M3",
}


class Range(NamedTuple):
    """Of a relative error."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Finding:
    """One relative error."""

    case: str
    """The recipe, and what its history knows."""
    recipe: str
    measure: str
    """Which product, and of what: "y", or "y, typical token"."""
    error: float
    expected: Range

    @property
    def fits(self) -> bool:
        return self.expected.low <= self.error <= self.expected.high


def operands(outliers: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [tokens, inputs], w [inputs, outputs] and dy [tokens, outputs], float32.

    Normal numbers; the tokens' gradients differ in size.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (TOKENS, INPUTS))
    w = jax.random.normal(keys[1], (INPUTS, OUTPUTS)) / np.sqrt(INPUTS)
    dy = jax.random.normal(keys[2], (TOKENS, OUTPUTS))
    dy *= jnp.exp(jax.random.normal(keys[3], (TOKENS, 1)))
    if outliers:
        x = x.at[::TOKENS_APART, OUTLIER_CHANNEL].mul(OUTLIER)
    return x, w, dy


@jax.jit
def product_and_gradients(x, w, dy, matmul, amax=None):
    """y, dx and dw."""
    y, backward = jax.vjp(lambda x, w: matmul.multiply(x, w, amax), x, w)
    return y, *backward(dy)


def errors(made, exact) -> tuple[list[float], list[float]]:
    """Of each of y, dx and dw, relative: of the whole, and of the median row."""

    def size(x, axis):
        return np.sqrt(np.square(np.asarray(x, np.float64)).sum(axis))

    whole = [float(size(m - e, None) / size(e, None)) for m, e in zip(made, exact, strict=True)]
    rows = [float(np.median(size(m - e, 1) / size(e, 1))) for m, e in zip(made, exact, strict=True)]
    return whole, rows


def of_many(form: Format) -> Range:
    """Of many numbers of all sizes, rounded to `form`."""
    bits = jnp.finfo(form.dtype).nmant
    return _around(2.0**-bits * math.sqrt(3 / (4 * math.log(4)) / 12))


def of_few(form: Format) -> Range:
    """Of a few numbers, rounded to `form`: at most half the distance of two."""
    return Range(0.0, 2.0 ** -(jnp.finfo(form.dtype).nmant + 1))


def of_smallest(form: Format, amax: float) -> Range:
    """Of numbers around 1 that the largest, `amax`, leaves to the subnormals of `form`."""
    limits = jnp.finfo(form.dtype)
    return _around(amax / float(limits.max) * float(limits.smallest_subnormal) / math.sqrt(12))


def _around(value: float) -> Range:
    return Range((1 - MARGIN) * value, (1 + MARGIN) * value)


ALL_LOST = _around(1.0)


def of_product(left: Range, right: Range) -> Range:
    """Of a product of many terms, from its operands'."""
    return Range(math.hypot(left.low, right.low), math.hypot(left.high, right.high))


def without_outliers() -> list[Finding]:
    """Errors of y, dx and dw, recipe by recipe; a history knows the numbers at hand."""
    x, w, dy = operands()
    exact = product_and_gradients(x, w, dy, NO_FP8)
    found = []
    for name, recipe in RECIPES.items():
        amax = largest_each(x, w, dy) if recipe.history else None
        whole, _ = errors(product_and_gradients(x, w, dy, LinearMatmul(recipe), amax), exact)
        forms = {"x": recipe.activation, "w": recipe.weight, "dy": recipe.gradient}
        for product, error in zip(PRODUCTS, whole, strict=True):
            expected = of_product(*(of_many(forms[operand]) for operand in READ[product]))
            found.append(Finding(name, name, product, error, expected))
    return found


def with_outliers() -> list[Finding]:
    """Errors of y and dw, which read x: of the typical row, without an outlier, and of all."""
    x, w, dy = operands(outliers=True)
    exact = product_and_gradients(x, w, dy, NO_FP8)
    found = []
    for case, recipe, amax, ordinary, outlying in _cases(x, w, dy):
        whole, rows = errors(product_and_gradients(x, w, dy, LinearMatmul(recipe), amax), exact)
        others = {"y": recipe.weight, "dw": recipe.gradient}
        for product, row in (("y", "typical token"), ("dw", "typical channel")):
            other, number = of_many(others[product]), PRODUCTS.index(product)
            for measure, error, of_x in (
                (f"{product}, {row}", rows[number], ordinary),
                (f"{product}, all", whole[number], outlying),
            ):
                expected = ALL_LOST if of_x == ALL_LOST else of_product(of_x, other)
                found.append(Finding(case, recipe.name, measure, error, expected))
    return found


def _cases(
    x: jax.Array, w: jax.Array, dy: jax.Array
) -> list[tuple[str, Recipe, jax.Array | None, Range, Range]]:
    """A name, the recipe, its history; what x's ordinary numbers and its outliers lose."""
    delayed, current = RECIPES["delayed"], RECIPES["current"]
    form = delayed.activation
    now = largest_each(x, w, dy)
    before, spike = largest_each(*operands()), now.at[0].mul(SPIKE)
    cases = [
        ("delayed, as before the outliers", delayed, before, of_many(form), ALL_LOST),
        ("delayed, as after a larger spike", delayed, spike, ALL_LOST, of_few(form)),
        ("current", current, None, of_smallest(form, float(now[0])), of_few(form)),
    ]
    for name in ("block", "mxfp8"):
        form = RECIPES[name].activation
        cases.append((name, RECIPES[name], None, of_many(form), of_few(form)))
    return cases
