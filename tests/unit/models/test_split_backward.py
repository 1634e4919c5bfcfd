"""What a split backward holds between its halves, and that both together are the whole backward.

Shapes: S sequence, H hidden, F ffn.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from geojax import make_mesh
from geojax.models.chunk.residuals import forward
from geojax.models.chunk.split_backward import SplitBackward

RANKS, S, H, F = 4, 16, 6, 20
SHARD, HIDDEN = (S // RANKS, H), (S, F // RANKS)


def block(weights, x):
    """A residual block with sequence parallelism: [S / tensor, H] to the same."""
    scale, up, down = weights
    gathered = lax.all_gather(jnp.tanh(x) * scale, "tensor", axis=0, tiled=True)
    made = jnp.square(jax.nn.relu(gathered @ up)) @ down
    return x + lax.psum_scatter(made, "tensor", scatter_dimension=0, tiled=True)


def by_halves(weights, x, cotangent, function=block):
    """Both gradients, and the shapes of the residuals and of the stash."""
    _, residuals = forward(lambda weights, x: function(weights, x), weights, x, again=(weights,))
    split = SplitBackward.of(residuals, (weights,), cotangent)
    gradient, stash = split.input_gradient(residuals, (weights,), cotangent)
    shapes.append([value.shape for value in stash.values])
    return stash.weight_gradients(residuals, (weights,)), gradient


shapes: list[list[tuple[int, ...]]] = []


def on_ranks(function):
    weights = P(None), P(None, "tensor"), P("tensor", None)
    x = P("tensor", None)
    mesh = make_mesh(devices=jax.devices()[:RANKS], tensor=RANKS)
    specs = {"in_specs": (weights, x, x), "out_specs": (weights, x)}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))


def arguments():
    draw = np.random.default_rng(0).standard_normal
    weights = tuple(jnp.asarray(draw(shape)) for shape in ((H,), (H, F), (F, H)))
    return weights, jnp.asarray(draw((S, H))), jnp.asarray(draw((S, H)))


def test_the_stash_has_shards_and_sums_and_no_gathered_position():
    with jax.enable_x64(True):
        shapes.clear()
        jax.eval_shape(on_ranks(by_halves), *arguments())
    # The cotangents of `down` (before it is gathered) and of `up`, and the gradient of the scale.
    assert sorted(shapes[0]) == sorted([SHARD, HIDDEN, (H,)])


def test_with_full_rematerialization_the_input_of_the_second_product_is_held_too():
    with jax.enable_x64(True):
        shapes.clear()
        recomputed = jax.checkpoint(block, prevent_cse=False)
        jax.eval_shape(
            on_ranks(lambda *arguments: by_halves(*arguments, function=recomputed)), *arguments()
        )
    assert sorted(shapes[0]) == sorted([SHARD, HIDDEN, HIDDEN, (H,)])


def test_both_halves_are_the_backward():
    def whole(weights, x, cotangent):
        return jax.vjp(block, weights, x)[1](cotangent)

    with jax.enable_x64(True):
        expected = on_ranks(whole)(*arguments())
        actual = on_ranks(by_halves)(*arguments())
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
