"""The order of the rows of a linear layer's products, which its results do not depend on."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from model_families import FAMILIES

from geojax.models.context import ComputeSettings
from geojax.models.layers import Linear

B, S, INPUTS, OUTPUTS = 2, 3, 4, 5


def of_layer(*, positions_first):
    """The results of a layer and their gradients, and how often it turns an array."""
    draw = np.random.default_rng(0).standard_normal
    x, kernel = (jnp.asarray(draw(shape)) for shape in ((B, S, INPUTS), (INPUTS, OUTPUTS)))
    config = FAMILIES["gpt3"]
    compute = ComputeSettings(positions_first=positions_first)
    graph = nnx.graphdef(Linear(INPUTS, OUTPUTS, config, compute))

    def apply(x, kernel):
        return nnx.merge(graph, {"kernel": kernel})(x)

    def gradients(x, kernel):
        made, transposed = jax.vjp(apply, x, kernel)
        return made, *transposed(jnp.arange(made.size, dtype=made.dtype).reshape(made.shape))

    turns = str(jax.make_jaxpr(apply)(x, kernel)).count("transpose")
    return gradients(x, kernel), turns


def test_results_and_gradients_are_the_same_in_either_order():
    made, turns = of_layer(positions_first=True)
    expected, none = of_layer(positions_first=False)
    assert [each.shape for each in made] == [(B, S, OUTPUTS), (B, S, INPUTS), (INPUTS, OUTPUTS)]
    assert (turns, none) == (2, 0), "what enters, and what leaves"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), made, expected)
