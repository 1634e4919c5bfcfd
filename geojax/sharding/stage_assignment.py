"""The layers of a leaf that each stage of a pipeline holds.

Of a leaf whose leading dim counts layers a stage holds its own layers, in the order in which it
runs them. Any other leaf (a table, the head, a norm) counts as layer 0, which the stages that use
it hold. All stages hold equally many layers, so that one program fits all of them: -1 stands for a
padding layer of zeros.

    3 stages, 5 layers          layers of each stage        those of a tied embedding
    stage 0  layers 0 and 1     (0, 1)                      (0,)
    stage 1  layers 2 and 3     (2, 3)                      (-1,)
    stage 2  layer 4            (4, -1)                     (0,)

Shapes: L layers of the model, P stages, S layers of a stage.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PADDING_LAYER = -1
"""The number of a layer that the model does not have."""


@dataclasses.dataclass(frozen=True)
class StageAssignment:
    """The layers of a leaf on the stages of a pipeline; in an array, stage after stage."""

    axes: tuple[str, ...]
    """The mesh axes that number the stages, the last one fastest."""

    layers_of_stage: tuple[tuple[int, ...], ...]
    """The layers that each stage holds, as indices of the leading dim."""

    stacked: bool = True
    """True if the leaf has a leading dim of layers; otherwise the leaf as a whole is layer 0."""

    def __post_init__(self) -> None:
        lengths = {len(layers) for layers in self.layers_of_stage}
        assert len(lengths) == 1, "stages must hold equally many layers"
        layers_held = set(self.order) - {PADDING_LAYER}
        assert self.stacked or layers_held == {0}, "a leaf without layers must be layer 0"

    @classmethod
    def on(cls, axes: tuple[str, ...], stages: int, holders: Collection[int]) -> "StageAssignment":
        """Assign a leaf without layers to the stages `holders`."""
        layers = tuple((0,) if stage in holders else (PADDING_LAYER,) for stage in range(stages))
        return cls(axes, layers, stacked=False)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.layers_of_stage)

    @property
    def layers_per_stage(self) -> int:
        """The number of layers of every stage, padding included."""
        return len(self.layers_of_stage[0])

    @property
    def order(self) -> tuple[int, ...]:
        """The layers of all stages, one stage after the other."""
        return tuple(layer for layers in self.layers_of_stage for layer in layers)

    @property
    def has_padding(self) -> bool:
        """True if some stage holds a padding layer."""
        return PADDING_LAYER in self.order

    @property
    def shared(self) -> bool:
        """True if two stages hold the same layer."""
        filled = [layer for layer in self.order if layer != PADDING_LAYER]
        return len(filled) > len(set(filled))

    @property
    def holders(self) -> list[int]:
        """The stages that hold a layer."""
        rows = enumerate(self.layers_of_stage)
        return [stage for stage, layers in rows if set(layers) != {PADDING_LAYER}]

    @property
    def is_order_of_leaf(self) -> bool:
        """True if the layers of all stages, one stage after the other, are the leaf itself."""
        return self.stacked and self.order == tuple(range(len(self.order)))

    def to_stages(self, leaf: jax.Array) -> jax.Array:
        """Bring the layers of a leaf to their stages.

        Args:
            leaf: [L, ...]; without layers [...].

        Returns:
            [P * S, ...]; padding layers are zeros.
        """
        if not self.stacked:
            layers_held = np.array(self.order) != PADDING_LAYER
            return jnp.where(_as_column(layers_held, leaf.ndim + 1), leaf[None], 0)
        if self.is_order_of_leaf:
            return leaf
        outside = leaf.shape[0]
        layers = np.array([outside if layer == PADDING_LAYER else layer for layer in self.order])
        return leaf.at[layers].get(mode="fill", fill_value=0)

    def from_stages(self, to_stages: jax.Array) -> jax.Array:
        """Invert `to_stages`; of a layer that two stages hold, take the first one's."""
        if not self.stacked:
            return to_stages[self.order.index(0)]
        if self.is_order_of_leaf:
            return to_stages
        return to_stages[
            np.array([self.order.index(layer) for layer in range(1 + max(self.order))])
        ]

    def of_this_stage(self) -> jax.Array:
        """Return the layers of this device's stage, int32 [S]; call it inside a `shard_map`."""
        return self._entry_of_stage(np.array(self.layers_of_stage, np.int32))

    def hold(self, layers: jax.Array) -> jax.Array:
        """Zero the padding among the layers [S, ...] of this device's stage."""
        if not self.has_padding:
            return layers
        return self._select(np.array(self.layers_of_stage) != PADDING_LAYER, layers)

    def count_once(self, layers: jax.Array) -> jax.Array:
        """Zero those layers [S, ...] of this device's stage that an earlier stage holds too."""
        if not self.shared:
            return layers
        order = self.order
        first = np.array([order.index(layer) == index for index, layer in enumerate(order)])
        return self._select(first.reshape(self.stages, -1), layers)

    def _select(self, kept: np.ndarray, layers: jax.Array) -> jax.Array:
        mask = self._entry_of_stage(kept)
        return jnp.where(_as_column(mask, layers.ndim), layers, 0)

    def _entry_of_stage(self, table: np.ndarray) -> jax.Array:
        """Return the entry of this device's stage in a table [P, S]."""
        return jnp.asarray(table)[lax.axis_index(self.axes)]


def _as_column(mask: Any, dims: int) -> Any:
    """Reshape [S] to [S, 1, ...] of `dims` dims."""
    return mask.reshape(-1, *(1,) * (dims - 1))
