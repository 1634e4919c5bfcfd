"""Inputs and outputs of a loop over layers: weights, residuals and gradients, layer by layer.

A `WeightSource` gives out weights, a `LayerStore` keeps the residuals between forward and backward,
a `GradientSink` takes gradients. The loops of `geojax.models.chunk.layer_scan` are the same for
weights that a rank holds whole and for weights that are gathered layer by layer, and for residuals
that are stacked and for residuals in ring buffers.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import typed_like, unwritten, zeros_of
from geojax.collectives.order import held_until
from geojax.models.declaration import Parameters
from geojax.precision import accumulate


class WeightSource(Protocol):
    """Gives out the weights of one layer after the other."""

    def take(
        self, prefetched: Any, index: jax.Array, following: jax.Array
    ) -> tuple[Parameters, Any]:
        """Return the weights of layer `index`, and the weights prefetched for layer `following`.

        `prefetched` holds the weights that the iteration before has prefetched.
        """


class LayerWeights(NamedTuple):
    """The weights of consecutive layers."""

    source: WeightSource
    """Numbers the layers from 0."""
    prefetched: Any = None
    """The weights that the source prefetched for the next layer; None: it prefetches nothing."""


class LayerStore(Protocol):
    """Keeps each layer's values for a later loop: residuals, or the stash of a split backward."""

    def start(self) -> Any:
        """Return the values that the loop carries before its first layer."""

    def put(self, stored: Any, index: jax.Array, value: Any) -> tuple[Any, Any]:
        """Return the values that the loop carries on, and those that it stacks for the layer."""

    def get(self, stored: Any, index: jax.Array) -> Any:
        """Return the values of layer `index`."""


class StashStore(LayerStore, Protocol):
    """Keeps the stash of a split backward, in a loop that reads residuals."""

    def begin(self, stored: Any, index: jax.Array, residuals: Any) -> tuple[Any, Any]:
        """Return the values that the loop carries, and the residuals to read layer `index` from."""

    def finish(self, stored: Any, stacked: Any) -> Any:
        """Return the stash of all layers, of what the loop carried and stacked."""


class GradientSink(Protocol):
    """Takes the gradients of the layers, those of one bucket together."""

    @property
    def warmup_iterations(self) -> int:
        """Iterations after which the structure of the sums no longer changes."""

    def put(self, sums: Any, first: jax.Array, gradients: Parameters) -> Any:
        """Return `sums` with the gradients in them, or on their way into them.

        `gradients` are those of the layers from `first` on, stacked.
        """


@dataclasses.dataclass(frozen=True)
class StackedWeights:
    """A source that holds the weights of its layers, stacked on a leading dim."""

    weights: Parameters
    first: jax.Array | int = 0
    """The position of the source's first layer in the stack."""

    def take(
        self, prefetched: None, index: jax.Array, following: jax.Array
    ) -> tuple[Parameters, None]:
        """Return a slice of the stack; nothing is prefetched."""
        return layer_slice(self.weights, _offset(self.first, index)), None

    def stack(self, count: int) -> Parameters:
        """Return the weights of `count` layers, stacked."""
        assert isinstance(self.first, int), "the position in the stack must be static"
        end = self.first + count
        return jax.tree.map(lambda leaf: leaf[self.first : end], self.weights)


@dataclasses.dataclass(frozen=True)
class StackedStore:
    """A store in which the results of a loop are stacked on a leading dim."""

    def start(self) -> None:
        """Carry nothing."""

    def put(self, stored: None, index: jax.Array, value: Any) -> tuple[None, Any]:
        """Stack the value."""
        return None, value

    def get(self, stored: Any, index: jax.Array) -> Any:
        """Return a slice of the stack."""
        return layer_slice(stored, index)

    def begin(self, stored: None, index: jax.Array, residuals: Any) -> tuple[None, Any]:
        """Read the residuals from where they are."""
        return None, residuals

    def finish(self, stored: None, stacked: Any) -> Any:
        """Return the stack."""
        return stacked


@dataclasses.dataclass(frozen=True)
class StackedGradients:
    """A sink that adds to the gradients of all layers, stacked on a leading dim."""

    dtype: Any
    """The dtype of the sums."""
    once: bool = False
    """True if each layer's gradient comes only once: it is written then, not added."""

    warmup_iterations = 0

    def start(self, layer: Parameters, count: int, zero: jax.Array | float = 0.0) -> Parameters:
        """Make sums of `zero` for `count` layers whose weights have the types of `layer`."""
        if self.once:
            return unwritten(layer, count, dtype=self.dtype, zero=zero)
        return zeros_of(layer, count, dtype=self.dtype, zero=zero)

    def put(self, sums: Parameters, first: jax.Array, gradients: Parameters) -> Parameters:
        """Add in place, where nothing else reads the sums."""
        return add_at(sums, first, gradients, empty=self.once)

    def finish(self, sums: Parameters) -> Parameters:
        """Return the stacked gradients."""
        return sums


@dataclasses.dataclass(frozen=True)
class SliceGradients:
    """A sink that adds to some layers of a longer stack, in place."""

    first: jax.Array
    """The position of the sink's first layer in the stack."""
    only_if: jax.Array | None = None
    """True where the gradients count; None: they always do."""

    warmup_iterations = 0

    def put(self, sums: Parameters, first: jax.Array, gradients: Parameters) -> Parameters:
        """Add the gradients, typed as the sums."""
        only_if = self.only_if
        if only_if is not None:
            gradients = jax.tree.map(lambda leaf: jnp.where(only_if, leaf, 0), gradients)
        added: Parameters = add_at(sums, _offset(self.first, first), gradients)
        return jax.tree.map(typed_like, added, sums)


class OwnGradients:
    """A sink that adds to gradients which are in no stack, of one bucket that is all its layers."""

    warmup_iterations = 0

    def put(self, sums: Parameters, first: jax.Array, gradients: Parameters) -> Parameters:
        """Add the gradients, typed as the sums."""
        added: Parameters = jax.tree.map(typed_like, accumulate(sums, gradients), sums)
        return added


def _offset(first: jax.Array | int, index: jax.Array) -> jax.Array:
    return index if isinstance(first, int) and first == 0 else first + index


def layer_slice(stacked: Any, index: jax.Array | int) -> Any:
    """Return one layer of a tree whose leaves have a leading layers dim."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(
            leaf, index, keepdims=False, allow_negative_indices=False
        ),
        stacked,
    )


def layers_slice(stacked: Any, first: jax.Array, count: int) -> Any:
    """Return `count` layers, from `first` on, of a tree whose leaves have a leading layers dim."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_slice_in_dim(leaf, first, count, allow_negative_indices=False),
        stacked,
    )


def add_at(sums: Any, first: jax.Array, tree: Any, *, empty: bool = False) -> Any:
    """Add `tree`, stacked layers from `first` on, to those layers of `sums`, in its dtypes.

    If `sums` are `empty` there, it is written. (See `geojax.precision.accumulate`.)
    """

    def add(total: jax.Array, leaf: jax.Array) -> jax.Array:
        # XLA for GPUs copies a slice whose place follows from the number of the iteration, and adds
        # to the copy: 8 bytes a weight more.
        place = held_until(jnp.asarray(first), leaf)
        if not empty:
            leaf = accumulate(layers_slice(total, place, leaf.shape[0]), leaf)
        return lax.dynamic_update_slice_in_dim(
            total, leaf.astype(total.dtype), place, axis=0, allow_negative_indices=False
        )

    return jax.tree.map(add, sums, tree)
