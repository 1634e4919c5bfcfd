"""Which rows of a leaf each stage of a pipeline holds.

Of a leaf whose leading dimension counts layers a stage holds those of its own layers, in the order
in which it runs them. Any other leaf (a table, the head, a norm) is a single row, which the stages
that use it hold. All stages hold equally many rows, so that one program fits all of them: -1 stands
for a row of zeros, which belongs to no layer.

    3 stages, 5 layers          rows                        rows of a tied embedding
    stage 0  layers 0 and 1     (0, 1)                      (0,)
    stage 1  layers 2 and 3     (2, 3)                      (-1,)
    stage 2  layer 4            (4, -1)                     (0,)
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EMPTY = -1
"""Stands for a row that belongs to no layer."""


@dataclasses.dataclass(frozen=True)
class StageRows:
    """How the stages of a pipeline hold a leaf; in an array of all stages, stage after stage."""

    axes: tuple[str, ...]
    """The mesh axes that number the stages, the last one fastest."""

    rows: tuple[tuple[int, ...], ...]
    """For each stage the indices of the leading dimension that it holds."""

    stacked: bool = True
    """Whether the leaf has that dimension; otherwise the leaf as a whole is row 0."""

    def __post_init__(self) -> None:
        assert len({len(held) for held in self.rows}) == 1, "stages hold equally many rows"
        held = set(self.order) - {EMPTY}
        assert held == set(range(len(held))), f"some row is on no stage: {sorted(held)}"
        assert self.stacked or held == {0}, "a leaf without layers is one row"

    @classmethod
    def on(cls, axes: tuple[str, ...], stages: int, holders: Collection[int]) -> "StageRows":
        """Of a leaf without layers that the stages `holders` hold."""
        rows = tuple((0,) if stage in holders else (EMPTY,) for stage in range(stages))
        return cls(axes, rows, stacked=False)

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.rows)

    @property
    def rows_per_stage(self) -> int:
        """Those of every stage, empty ones included."""
        return len(self.rows[0])

    @property
    def order(self) -> tuple[int, ...]:
        """The rows of all stages, one stage after the other."""
        return tuple(row for held in self.rows for row in held)

    @property
    def has_empty(self) -> bool:
        """Whether some stage holds an empty row."""
        return EMPTY in self.order

    @property
    def shared(self) -> bool:
        """Whether two stages hold the same row."""
        filled = [row for row in self.order if row != EMPTY]
        return len(filled) > len(set(filled))

    @property
    def is_order_of_leaf(self) -> bool:
        """Whether the rows of all stages, one stage after the other, are the leaf itself."""
        return self.stacked and self.order == tuple(range(len(self.order)))

    def spread(self, leaf: jax.Array) -> jax.Array:
        """[stages * rows, ...], the rows of all stages, from the leaf; empty ones are zeros."""
        if not self.stacked:
            held = np.array(self.order) != EMPTY
            return jnp.where(_as_column(held, leaf.ndim + 1), leaf[None], 0)
        if self.is_order_of_leaf:
            return leaf
        outside = leaf.shape[0]
        rows = np.array([outside if row == EMPTY else row for row in self.order])
        return leaf.at[rows].get(mode="fill", fill_value=0)

    def collect(self, spread: jax.Array) -> jax.Array:
        """The inverse of `spread`; of a row that two stages hold, the first one's."""
        if not self.stacked:
            return spread[self.order.index(0)]
        if self.is_order_of_leaf:
            return spread
        return spread[np.array([self.order.index(row) for row in range(1 + max(self.order))])]

    def of_this_stage(self) -> jax.Array:
        """int32 [rows]: the rows that this device's stage holds; inside a `shard_map`."""
        return self._mine(np.array(self.rows, np.int32))

    def hold(self, rows: jax.Array) -> jax.Array:
        """[rows, ...] of this device's stage, but zero in those that are empty."""
        if not self.has_empty:
            return rows
        return self._select(np.array(self.rows) != EMPTY, rows)

    def count_once(self, rows: jax.Array) -> jax.Array:
        """[rows, ...] of this device's stage, but zero where an earlier stage holds the row too."""
        if not self.shared:
            return rows
        order = self.order
        first = np.array([order.index(row) == place for place, row in enumerate(order)])
        return self._select(first.reshape(self.stages, -1), rows)

    def _select(self, kept: np.ndarray, rows: jax.Array) -> jax.Array:
        mask = self._mine(kept)
        return jnp.where(_as_column(mask, rows.ndim), rows, 0)

    def _mine(self, table: np.ndarray) -> jax.Array:
        """The row of this device's stage in a table [stages, rows]."""
        return jnp.asarray(table)[lax.axis_index(self.axes)]


def _as_column(mask: Any, dims: int) -> Any:
    """[rows] as [rows, 1, ...] of `dims` dimensions."""
    return mask.reshape(-1, *(1,) * (dims - 1))
