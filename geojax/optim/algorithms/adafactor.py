"""Adafactor on shards: second moments of matrices as the means of their rows and columns.

As `optax.scale_by_factored_rms` and `optax.clip_by_block_rms`, for each layer's matrix by itself
(Optax would take a stack of layers for one array) and for all matrices, however small. Means over a
dim that is cut are sums over the ranks of the site that hold its parts, of numbers a row or column.

The state has the dtype of the parameters whatever moments are stored in: in update t it changes by
t^-0.8 of its size, of which bf16 would see nothing from some 2,000 updates on.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from geojax.collectives import all_reduce
from geojax.models.declaration import KindOf
from geojax.named_arrays import leaf_name
from geojax.sharding.leaf_layouts import LeafLayout, replicated

DECAY_EXPONENT = 0.8
"""Second moments decay by 1 - t^-0.8 in update t (Shazeer and Stern, arXiv 1804.04235)."""

_EPSILON = 1e-30
_LARGEST_RMS = 1.0
"""The root mean square that the direction of a matrix or a vector is clipped to."""

ROW_MEANS, COLUMN_MEANS = "row_means", "column_means"
DIM_OF_MEANS = {ROW_MEANS: -1, COLUMN_MEANS: -2}
"""The dim over which each field of the state has means, and which it therefore lacks."""


class AdafactorState(NamedTuple):
    """The state of Adafactor."""

    count: Any
    row_means: Any
    """Mean squares over the columns [.., a] of matrices [.., a, b]; None for other leaves."""
    column_means: Any
    """Mean squares over the rows [.., b]."""
    squares: Any
    """Second moments of scales and biases; None for matrices."""


def scale_by_adafactor(kind_of: KindOf) -> optax.GradientTransformationExtraArgs:
    """Scale by Adafactor, without momentum and without the scale of the parameters.

    All parameters but vectors are matrices to it.

    `update` takes `layouts=`, the `LeafLayout` of each leaf, inside a `shard_map`; None: leaves are
    whole.
    """

    def init(parameters: Any) -> AdafactorState:
        def zeros(path: Any, leaf: Any, dim: int | None) -> jax.Array | None:
            if (kind_of(leaf_name(path)) == "vector") == (dim is not None):
                return None
            shape = list(leaf.shape)
            if dim is not None:
                del shape[dim]
            return jnp.zeros(shape, leaf.dtype)

        rows, columns, squares = (
            jax.tree_util.tree_map_with_path(
                lambda path, leaf, dim=dim: zeros(path, leaf, dim), parameters
            )
            for dim in (*DIM_OF_MEANS.values(), None)
        )
        return AdafactorState(jnp.zeros([], jnp.int32), rows, columns, squares)

    def update(
        gradients: Any,
        state: AdafactorState,
        parameters: Any = None,
        *,
        layouts: Any = None,
        **_: Any,
    ) -> tuple[Any, AdafactorState]:
        count = state.count + 1
        decay = 1 - jnp.asarray(count, jnp.float32) ** -DECAY_EXPONENT
        leaves, structure = jax.tree_util.tree_flatten_with_path(gradients)
        places = jax.tree.leaves(layouts or jax.tree.map(replicated, gradients))
        old = [dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in state[1:]]
        made = []
        for (path, gradient), place in zip(leaves, places, strict=True):
            rows, columns, squares = (tree.get(path) for tree in old)
            if squares is None:
                made.append(_of_matrix(gradient, place, decay, rows, columns))
            else:
                made.append(_of_vector(gradient, place, decay, squares))
        directions, *new = (
            jax.tree.unflatten(structure, [getattr(each, field) for each in made])
            for field in _Scaled._fields
        )
        return directions, AdafactorState(count, *new)

    return optax.GradientTransformationExtraArgs(init, update)


class _Scaled(NamedTuple):
    """A leaf's direction, and its new state."""

    direction: jax.Array
    row_means: jax.Array | None = None
    column_means: jax.Array | None = None
    squares: jax.Array | None = None


def _of_matrix(
    gradient: jax.Array, place: LeafLayout, decay: jax.Array, rows: Any, columns: Any
) -> _Scaled:
    square = jnp.square(gradient)
    row_means, column_means = (
        decay * old + (1 - decay) * (_mean(square, place, (dim,)).squeeze(dim) + _EPSILON)
        for old, dim in zip((rows, columns), DIM_OF_MEANS.values(), strict=True)
    )
    mean = _mean(row_means[..., None], place, (-2,))
    direction = gradient * jax.lax.rsqrt(row_means[..., None] / mean)
    direction *= jax.lax.rsqrt(column_means[..., None, :])
    return _Scaled(_clipped(direction, place, (-2, -1)), row_means, column_means)


def _of_vector(
    gradient: jax.Array, place: LeafLayout, decay: jax.Array, squares: jax.Array
) -> _Scaled:
    new = decay * squares + (1 - decay) * (jnp.square(gradient) + _EPSILON)
    return _Scaled(_clipped(gradient * jax.lax.rsqrt(new), place, (-1,)), squares=new)


def _clipped(direction: jax.Array, place: LeafLayout, dims: tuple[int, ...]) -> jax.Array:
    """Scale each matrix or vector to at most `_LARGEST_RMS`."""
    rms = jnp.sqrt(_mean(jnp.square(direction), place, dims))
    return direction / jnp.maximum(1, rms / _LARGEST_RMS)


def _mean(values: jax.Array, place: LeafLayout, dims: tuple[int, ...]) -> jax.Array:
    """Return the mean over `dims` of all of a leaf, padding left out; the dims stay, with length 1.

    Args:
        values: this rank's shard, with zeros as padding, or as `row_means` one that lacks no dim.
        place: the leaf's layout.
        dims: negative dims of the leaf.
    """
    total = jnp.sum(values, axis=dims, keepdims=True)
    if axes := summed_axes(place, dims):
        total = all_reduce(total, axes, ())
    for dim in dims:
        total = total / place.shape[dim]
    return total


def summed_axes(place: LeafLayout, dims: tuple[int, ...]) -> tuple[str, ...]:
    """Return the mesh axes whose ranks hold parts of `dims`, negative dims of a leaf."""
    cuts = [cut for cut in (*place.model_shards, place.shard) if cut is not None]
    axes = [cut.axes for cut in cuts if cut.dim - len(place.shape) in dims]
    assert all("dc" not in each for each in axes), "means stay inside a site"
    return tuple(axis for each in axes for axis in each)
