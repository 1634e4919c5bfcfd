"""Gather the weights of a pipeline stage chunk by chunk, beside the first ticks.

The first chunk is gathered before the ticks, as are the weights in no layer. The next one comes
while the stages compute with those before (`geojax.pipeline.execution.late_chunks`).

A chunk is one message: XLA for GPUs never has two collectives in flight that share more than one
device. So leaves that cannot share the message, those with the fewest numbers, are gathered before
the ticks too, for all chunks.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import typed_like, unwritten
from geojax.models import Parameters
from geojax.models.chunk.layer_io import layers_slice
from geojax.optim.leaf_groups import largest_group, shard_axes
from geojax.pipeline.execution.late_chunks import ticks_between_chunks
from geojax.precision import QuantizedWeight, attach_amax, detach_amax, is_quantized_weight
from geojax.sharding import LeafLayout
from geojax.step.gather import (
    computing_axes,
    gather_across_sites,
    gather_in_site,
    gather_weights,
    scales_are_sent,
    shards_to_gather,
    without_layers,
)
from geojax.step.plan import StepPlan


@dataclasses.dataclass(frozen=True)
class ChunkGather:
    """The gathering of a stage's layers, for `geojax.pipeline.execution.LateChunks`."""

    shards: Parameters
    """This rank's shards of all layers of the stage, as they travel."""
    layouts: Any
    """The `LeafLayout` of each."""
    plan: StepPlan
    prev_amax: Any
    """The amax of the steps before, of the same layers; None: no history."""

    @property
    def window(self) -> int:
        """Ticks beside which the next chunk comes."""
        return ticks_between_chunks(self.plan.program.ticks)

    def before_ticks(self) -> Parameters:
        """Gather what the first ticks read: of the leaves that come later the first chunk alone."""
        early = [number for number in range(len(self._leaves)) if number not in self._late]
        made = dict(zip(early, self._gathered(early), strict=True))
        first = self.gather(self.take(jnp.int32(0)))
        for number, leaf in zip(self._late, first, strict=True):
            chunks = self.plan.stages.placement.chunks_per_stage
            whole = jax.eval_shape(functools.partial(_repeated, count=chunks), leaf)
            made[number] = self._written(unwritten(whole), leaf, jnp.int32(0))
        leaves = [made[number] for number in range(len(self._leaves))]
        return attach_amax(self._tree(leaves), self.prev_amax)

    def take(self, chunk: jax.Array) -> list[Any]:
        """Copy this rank's shards of a chunk."""
        own = [self._leaves[number] for number in self._late]
        taken: list[Any] = layers_slice(own, chunk * self._count, self._count)
        return taken

    def gather(self, taken: list[Any]) -> list[Any]:
        """Gather them, in one message on a stream of its own."""
        layouts = [self._layouts[number].of_layers(self._count) for number in self._late]
        made: list[Any] = gather_in_site(taken, layouts, self.plan, beside_compute=True)
        return made

    def put(self, layers: Parameters, chunk: jax.Array, gathered: list[Any]) -> Parameters:
        """Put a chunk's weights among those of the stage's layers, in place."""
        weights, amax = detach_amax(layers)
        leaves = jax.tree.leaves(weights, is_leaf=is_quantized_weight)
        for number, leaf in zip(self._late, gathered, strict=True):
            leaves[number] = self._written(leaves[number], leaf, chunk)
        return attach_amax(self._tree(leaves), amax)

    @functools.cached_property
    def _leaves(self) -> list[Any]:
        return jax.tree.leaves(self.shards, is_leaf=is_quantized_weight)

    @functools.cached_property
    def _layouts(self) -> list[LeafLayout]:
        return jax.tree.leaves(self.layouts)

    @functools.cached_property
    def _late(self) -> Sequence[int]:
        """The numbers of the leaves that come with their chunk."""
        return late_leaves(self._leaves, self._layouts, self.plan)

    @property
    def _count(self) -> int:
        return self.plan.stages.max_layers_per_chunk

    def _tree(self, leaves: Sequence[Any]) -> Parameters:
        structure = jax.tree.structure(self.shards, is_leaf=is_quantized_weight)
        made: Parameters = jax.tree.unflatten(structure, leaves)
        return made

    def _gathered(self, numbers: Sequence[int]) -> list[Any]:
        """Gather leaves by their numbers, of all layers."""
        own = [self._leaves[each] for each in numbers]
        layouts = [self._layouts[each] for each in numbers]
        made: list[Any] = gather_in_site(own, layouts, self.plan)
        return made

    def _written(self, stack: Any, part: Any, chunk: jax.Array) -> Any:
        """Write a chunk's part of a leaf into the stack of all layers."""

        def write(whole: jax.Array, own: jax.Array) -> jax.Array:
            first = chunk * self._count
            return lax.dynamic_update_slice_in_dim(whole, typed_like(own, whole), first, 0)

        return jax.tree.map(write, stack, part)


def first_weights(
    shards: Parameters, layouts: Parameters, plan: StepPlan, prev_amax: Any
) -> tuple[Parameters, ChunkGather]:
    """Gather the weights that the first ticks of a pipeline read.

    Arguments are those of `geojax.step.gather.step_weights`.

    Returns:
        The weights of the stage, and what gathers the others.
    """
    of_layers = layouts["layers"]
    own = gather_across_sites(shards["layers"], of_layers, plan)
    sent = shards_to_gather(own, of_layers, plan, prev_amax, quantized=True)
    late = ChunkGather(sent, of_layers, plan, prev_amax)
    non_layer_params = gather_weights(without_layers(shards), without_layers(layouts), plan)
    return non_layer_params | {"layers": late.before_ticks()}, late


def late_leaves(
    leaves: Sequence[Any], layouts: Sequence[LeafLayout], plan: StepPlan
) -> Sequence[int]:
    """Return the numbers of the leaves of layers that come with their chunk.

    They share a message: they are sharded over the same axes of a site, vary over the same ones,
    and have one dtype. Of several such groups it is the one with the most numbers.

    Args:
        leaves: as they travel: arrays, `QuantizedWeight`s, or the shapes of these.
        layouts: of all layers of a stage.
        plan: how the step runs.
    """

    def key(leaf: Any, layout: LeafLayout) -> Any:
        quantized = isinstance(leaf, QuantizedWeight)
        axes = shard_axes(layout)[0]
        if axes is None or (quantized and scales_are_sent(leaf.scales.ndim, layout)):
            return None
        dtype = leaf.values.dtype if quantized else leaf.dtype
        model_axes = frozenset(axis for each in layout.model_shards for axis in each.axes)
        return axes, dtype, model_axes, computing_axes(layout, plan)

    return largest_group(map(key, leaves, layouts), layouts)


def _repeated(leaf: Any, count: int) -> Any:
    """Return `count` times as many layers as those of a leaf."""
    return jax.tree.map(lambda layers: jnp.concatenate([layers] * count), leaf)
