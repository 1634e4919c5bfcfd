"""Settings and data of a batch, with which modules compute beside their weights.

Shapes: B batch, S sequence. With sequence parallelism the residual stream has S / tensor positions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from geojax.models.config import ModelConfig
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.sequence_order import local_positions
from geojax.models.rotary import rotary_table
from geojax.precision import NO_FP8, LinearMatmul


@dataclasses.dataclass(frozen=True)
class ComputeSettings:
    """Settings of a program, with which its modules compute."""

    parallelism: Parallelism = SINGLE_DEVICE
    """Sharding of model and sequences; modules then hold this rank's shards."""
    matmul: LinearMatmul = NO_FP8
    """Matmul of linear layers; embedding, router and head multiply in the compute dtype."""
    attention: str = "auto"
    """An implementation that `geojax.models.attention` knows."""

    gathers_again: bool = False
    """With `parallelism.chunks`: what enters the products of ranks of `tensor` is gathered once
    more for the backward pass (`geojax.models.parallel.entered_products`), not kept."""

    positions_first: bool = False
    """True if the rows of a product are in the order of positions, not of sequences: XLA for GPUs
    gathers the stream over ranks of `tensor` in that order, and else turns it in memory."""

    @property
    def without_fp8(self) -> "ComputeSettings":
        """The same, with products in the compute dtype."""
        return dataclasses.replace(self, matmul=NO_FP8)

    def matmul_at(self, context: "LayerContext | None") -> LinearMatmul:
        """Return the matmul of the layer that `context` is of."""
        if context is None or context.follows_recipe is None:
            return self.matmul
        return dataclasses.replace(self.matmul, quantized=context.follows_recipe)


ON_ONE_DEVICE = ComputeSettings()
"""Unsharded, in the compute dtype."""

Attend: TypeAlias = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
"""(a module of attention, queries, keys, values) to the mixed values."""


class LayerContext(NamedTuple):
    """Data of the batch that every layer reads."""

    segment_ids: jax.Array | None
    """int32 [B, S]; attention stays inside a segment. None: each sequence is one segment."""
    rotary: tuple[jax.Array, jax.Array] | None
    """Cosines and sines of the positions; None where positions are learned, or each layer makes its
    own of `positions`."""
    local_rotary: tuple[jax.Array, jax.Array] | None
    """Cosines and sines of layers with a window; None: they are the same."""
    sequence_indices: jax.Array | None
    """int32 [B], the sequences' indices in the global batch; None: nothing is random."""
    sequence_positions: jax.Array
    """int32 [S], the positions in the sequence that this rank's share of the batch holds (with
    sequence parallelism the residual stream has a part of them)."""
    positions: jax.Array | None = None
    """int32 [B, S], the tokens' positions in their documents; None: no layer asks for them."""
    dropout_key: jax.Array | None = None
    """Key that holds seed and step; None: nothing is random."""
    layer: jax.Array | None = None
    """int32 [], the layer's number in the whole model, from 0; None: the context is of no layer."""
    follows_recipe: jax.Array | None = None
    """bool [], True if the layer multiplies by the FP8 recipe; None: it does if there is one."""
    attend: Attend | None = None
    """Attention to a cache; None: to the sequence, causally."""

    @property
    def key(self) -> jax.Array | None:
        """Key of seed, step and layer (0: the embedding); None: nothing is random."""
        if self.dropout_key is None:
            return None
        return jax.random.fold_in(self.dropout_key, 0 if self.layer is None else self.layer + 1)


def make_context(
    batch: dict[str, jax.Array],
    config: ModelConfig,
    dtype: jnp.dtype,
    dropout_key: jax.Array | None = None,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> LayerContext:
    """Make the context of a batch, for layers that compute in `dtype`."""
    rotary, local_rotary = rotary_tables(batch["positions"], config, dtype)
    key = dropout_key if config.dropout > 0 else None
    positions = local_positions(batch["tokens"].shape[1], parallelism)
    return LayerContext(
        batch["segment_ids"], rotary, local_rotary, batch["row"], positions, dropout_key=key
    )


def rotary_tables(
    positions: jax.Array, config: ModelConfig, dtype: jnp.dtype
) -> tuple[tuple[jax.Array, jax.Array] | None, tuple[jax.Array, jax.Array] | None]:
    """Make `rotary` and `local_rotary` of a `LayerContext` for `positions` int32 [B, S]."""
    if config.position_embedding_type != "rope":
        return None, None
    rotary = rotary_table(positions, config, dtype)
    if config.local_rope_parameters is None:
        return rotary, None
    local = config.model_copy(update={"rope_parameters": config.local_rope_parameters})
    return rotary, rotary_table(positions, local, dtype)
