"""Muon on shards: momentum of each element, and directions of whole matrices.

As `optax.contrib.muon` with Nesterov's momentum and the scale of Liu et al. (arXiv 2502.16982), at
which an update is as large as AdamW's, so that one learning rate does for both. The matrix is a
layer's whole projection over all its heads, and gate and up are two.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from geojax.optim.algorithms.matrix_shares import map_matrices
from geojax.optim.optimizer_state import SkipAwareTransformation, narrow, select, widen
from geojax.sharding.leaf_layouts import replicated

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
"""Newton-Schulz iterations of an update."""

_UPDATE_RMS = 0.2
"""Root mean square of an update, about that of AdamW."""

_NUMBERS_AT_ONCE = 2**24
"""Most numbers of the matrices that are orthogonalized at once: several small ones fill a device,
and of large ones the temporary copies must be few."""


class MuonState(NamedTuple):
    """The state of Muon."""

    count: Any
    mu: Any
    """Momentum."""


def scale_by_muon(
    momentum: float, epsilon: float, moment_dtype: Any = None
) -> SkipAwareTransformation:
    """Orthogonalize the momentum of each matrix.

    `update` takes `layouts=`, the `LeafLayout` of each leaf, inside a `shard_map` (None: leaves are
    whole), and `finite=`, a bool: where it is False the state stays as it is.

    Args:
        momentum: decay of the momentum.
        epsilon: added to a matrix's norm, by which it is divided.
        moment_dtype: dtype of the stored momentum; None: that of the parameters.
    """

    def init(parameters: Any) -> MuonState:
        zeros = optax.tree.zeros_like(parameters)
        return MuonState(jnp.zeros([], jnp.int32), narrow(zeros, moment_dtype))

    def update(
        gradients: Any,
        state: MuonState,
        parameters: Any = None,
        *,
        finite: jax.Array | bool = True,
        layouts: Any = None,
        **_: Any,
    ) -> tuple[Any, MuonState]:
        count = state.count + 1
        wide = widen(state.mu, moment_dtype, gradients)
        new = optax.tree.update_moment(gradients, wide, momentum, 1)
        kept = select(finite, narrow(new, moment_dtype), state.mu)
        stored = jax.tree.map(jax.lax.optimization_barrier, kept)
        ahead = jax.tree.map(
            lambda mean, gradient: momentum * mean + (1 - momentum) * gradient,
            optax.tree.bias_correction(widen(stored, moment_dtype, gradients), momentum, count + 1),
            optax.tree.bias_correction(gradients, momentum, count),
        )
        if layouts is None:
            layouts = jax.tree.map(replicated, gradients)

        def direction(matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            scale = _UPDATE_RMS * math.sqrt(max(shape))
            return scale * orthogonalize(matrices, epsilon)

        directions = map_matrices(direction, ahead, layouts)
        return directions, MuonState(select(finite, count, state.count), stored)

    return SkipAwareTransformation(init, update)


def orthogonalize(matrices: jax.Array, epsilon: float) -> jax.Array:
    """Bring the singular values of each matrix near 1, a few matrices at once.

    By the quintic Newton-Schulz iteration of Keller Jordan's Muon. Zero rows and columns stay zero.

    Args:
        matrices: [m, a, b].
        epsilon: added to a matrix's norm, by which it is divided.
    """
    count, rows, columns = matrices.shape
    at_once = max(1, _NUMBERS_AT_ONCE // (rows * columns))

    def one(matrix: jax.Array) -> jax.Array:
        return _newton_schulz(matrix, epsilon)

    if count <= at_once:
        return jax.vmap(one)(matrices)
    made: jax.Array = jax.lax.map(one, matrices, batch_size=at_once)
    return made


def _newton_schulz(matrix: jax.Array, epsilon: float) -> jax.Array:
    if matrix.shape[0] > matrix.shape[1]:
        return _newton_schulz(matrix.T, epsilon).T
    linear, cubic, quintic = _COEFFICIENTS

    def iteration(_: Any, x: jax.Array) -> jax.Array:
        squares = x @ x.T
        return linear * x + (cubic * squares + quintic * squares @ squares) @ x

    start = matrix / (jnp.linalg.norm(matrix) + epsilon)
    made: jax.Array = jax.lax.fori_loop(0, ITERATIONS, iteration, start)
    return made
