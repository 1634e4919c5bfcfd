"""A layer of a model of your own on one rank, from abstract traces: work, memory and messages.

Its modules may call collectives, and hold parts of their weights: they are traced in a `shard_map`
over the axes that share a layer. No device is touched.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from geojax.collectives.axes import to_varying
from geojax.mesh import AXES
from geojax.models import OwnModel, partitions
from geojax.models.chunk.layer_scan import forward_layer
from geojax.models.chunk.remat import Remat
from geojax.models.context import ComputeSettings
from geojax.models.own.chunk import own_chunk
from geojax.models.own.work import Products, layer_shapes, traced_products
from geojax.models.parallel.parallelism import Parallelism
from geojax.pipeline.schedule import LayerBytes
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.cost.held_bytes import held_bytes
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.program_traffic import program_traffic
from geojax.planner.traffic.by_axes import Axes
from geojax.precision import policy


@dataclasses.dataclass(frozen=True)
class LayerMessages:
    """The collectives of a layer over some axes, for one microbatch."""

    forward_bytes: float
    """Bytes that a device sends in the forward."""
    backward_bytes: float
    """Bytes that it sends in the backward, with a forward that is computed again."""
    forward: float
    """Number of collectives in the forward."""
    backward: float
    """Number of collectives in the backward."""


@dataclasses.dataclass(frozen=True)
class OwnLayer:
    """A layer of a rank, for one microbatch."""

    products: Products
    """The products of its forward."""
    held: LayerBytes
    messages: Mapping[Axes, LayerMessages]
    """Messages by the axes over which they travel."""


def layer_of_rank(model: OwnModel, layout: LayoutCandidate, *, split: bool = False) -> OwnLayer:
    """Trace a layer of a layout; see `own_layer`."""
    return own_layer(
        model,
        layout.model_parallelism,
        layout.microbatch_size,
        layout.batch.sequence_length,
        layout.remat,
        policy(layout.precision).compute_dtype,
        split=split,
    )


@functools.lru_cache(maxsize=256)
def own_layer(
    model: OwnModel,
    parallelism: Parallelism,
    sequences: int,
    length: int,
    remat: Remat,
    dtype: jnp.dtype,
    *,
    split: bool,
) -> OwnLayer:
    """Trace a layer with a microbatch of `sequences` whole sequences of `length` on a rank.

    Args:
        model: the model.
        parallelism: how ranks share a layer, a sequence and experts.
        sequences: sequences of a microbatch.
        length: positions of a whole sequence.
        remat: the rematerialization policy.
        dtype: the compute dtype.
        split: True if the backward is split.
    """
    ranks = _Ranks(model, parallelism, sequences, length, dtype)
    chunk = own_chunk(
        model,
        range(model.num_stacked_layers),
        dtype,
        ComputeSettings(parallelism),
        dropout_key=None,
        remat=remat,
    )
    layer, context_of = chunk.functions.layer, chunk.functions.context
    held: list[LayerBytes] = []

    def forward(weights: Any, x: jax.Array, batch: Any) -> Any:
        return layer(weights, x, jnp.int32(0), context_of(batch))

    def both(weights: Any, x: jax.Array, batch: Any) -> Any:
        again = weights, jnp.int32(0), context_of(batch)
        made, residuals = forward_layer(layer, x, again)
        held.append(held_bytes(residuals, again, made, split=split))
        return made, residuals.backward(made, again)

    once, twice = ranks.trace(forward), ranks.trace(both)
    tokens = sequences * length // parallelism.context
    products = traced_products(once.jaxpr.jaxpr, model, tokens, parallelism)
    return OwnLayer(products, held[0], dict(_messages(ranks.sent(once), ranks.sent(twice))))


def _messages(
    forward: Mapping[Axes, tuple[float, float]], both: Mapping[Axes, tuple[float, float]]
) -> Iterator[tuple[Axes, LayerMessages]]:
    for axes, (all_bytes, count) in both.items():
        own_bytes, own = forward.get(axes, (0.0, 0.0))
        yield axes, LayerMessages(own_bytes, all_bytes - own_bytes, own, count - own)


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """Ranks that share layers, sequences and experts, and what a layer is called with there."""

    model: OwnModel
    parallelism: Parallelism
    sequences: int
    length: int
    dtype: jnp.dtype

    @property
    def _sizes(self) -> dict[str, int]:
        return {axis: getattr(self.parallelism, axis, 1) for axis in AXES}

    def trace(self, function: Callable[[Any, jax.Array, Any], Any]) -> jax.stages.Traced:
        """Trace a function of a layer's weights, the stream and a microbatch, on every rank."""
        places = partitions(self.model, self.parallelism)["layers"]
        used = [axis for axis, size in self._sizes.items() if size > 1]
        rows = [axis for axis in ("expert", "context") if axis in used]

        def spec(*axes: str | None) -> PartitionSpec:
            return PartitionSpec(*(axis if axis in used else None for axis in axes))

        def of_place(place: Any, leaf: Any) -> PartitionSpec:
            return PartitionSpec(*(place.axes_by_dim.get(1 + dim) for dim in range(leaf.ndim)))

        def per_rank(weights: Any, x: jax.Array, batch: Any) -> Any:
            # A step sums gradients elsewhere.
            weights = jax.tree.map(
                lambda leaf, place: to_varying(
                    leaf, [*rows, *(("tensor",) if place.partial else ())]
                ),
                weights,
                places,
            )
            made = function(weights, x, batch)
            return jax.tree.map(lambda leaf: to_varying(leaf[None], used), made)

        shared = ("context", "tensor") if self.parallelism.sequence else ("context",)
        of_stream = tuple(axis for axis in shared if axis in used)
        count = self.sequences * self.parallelism.expert
        shapes = layer_shapes(self.model, count, self.length, self.dtype)
        weights, _, batch = shapes
        specs = {name: spec("expert", "context") for name in batch} | {"row": spec("expert")}
        program = jax.shard_map(
            per_rank,
            mesh=abstract_mesh(self._sizes),
            in_specs=(
                jax.tree.map(of_place, places, weights),
                PartitionSpec(*spec("expert"), of_stream or None),
                specs,
            ),
            out_specs=PartitionSpec(tuple(used) or None),
            check_vma=True,
        )
        return jax.jit(program).trace(*shapes)

    def sent(self, program: jax.stages.Traced) -> dict[Axes, tuple[float, float]]:
        """Return the bytes and the messages of a device by axes, with equally busy experts."""
        found: dict[Axes, tuple[float, float]] = {}
        for each in program_traffic(program, abstract_mesh(self._sizes)).collectives:
            if each.conditional:  # for tokens of busier experts
                continue
            count, messages = found.get(each.axes, (0.0, 0.0))
            found[each.axes] = count + float(each.bytes_sent), messages + each.executions
        return found
