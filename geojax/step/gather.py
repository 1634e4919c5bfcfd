"""Gather weights: a rank's parts of them in the compute dtype, from the shards of the state.

The first functions take any subtree of the parameters with the `LeafLayout`s of its leaves, inside
the step's `shard_map`: the whole tree, or one layer's slice.

    shards ─(all_gather over dc, if sharded there)─► all_gather in the site ─► a rank's parts

Weights may be quantized to FP8 in between (`geojax.step.fp8_all_gather`).

A step gathers its weights once, or layer by layer (ZeRO 3), by the sources of
`geojax.models.chunk.layer_io`. Layers with FP8 matmuls and layers with bf16 matmuls have sources of
their own: kernels of the former are quantized before they are gathered. The few bf16 layers at the
ends are gathered once a step under ZeRO 3 too, as are the weights in no layer.
"""

import dataclasses
import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from geojax.collectives import all_gather
from geojax.collectives.axes import to_varying, varying_axes, zero_after
from geojax.models import AnyModel, Parameters
from geojax.models.chunk.layer_io import LayerWeights, StackedWeights, WeightSource, layer_slice
from geojax.optim.leaf_groups import map_by_group, shard_axes, shard_dim
from geojax.precision import QuantizedWeight, Weight, attach_amax, is_quantized_weight
from geojax.sharding import LeafLayout
from geojax.step.fp8_all_gather import kernel_amax, quantize_kernels
from geojax.step.plan import StepPlan


def gather_weights(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """Gather this rank's parts of the weights, in the compute dtype.

    Nothing crosses `dc` unless the state is sharded over it. The weights are typed as varying over
    every axis along which ranks see other tokens, so that their gradient stays on the device until
    it is reduced.
    """
    return gather_in_site(gather_across_sites(shards, layouts, plan), layouts, plan)


@jax.named_scope("gather_weights")
def gather_across_sites(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """Gather over `dc` the leaves that are sharded over it: the first half of `gather_weights`.

    Those come out in the compute dtype, all others as they were, and none has a dimension of
    stages. Of stacked layers, one layer after the other may take the second half.
    """

    def gather(
        across: Any, leaves: list[jax.Array], leaf_layouts: list[LeafLayout]
    ) -> list[jax.Array]:
        leaves = [
            leaf[0] if layout.has_stage_dim else leaf
            for leaf, layout in zip(leaves, leaf_layouts, strict=True)
        ]
        if not across:
            return leaves
        cast = [
            leaf.astype(layout.gathered_dtype(plan.policy.compute_dtype))
            for leaf, layout in zip(leaves, leaf_layouts, strict=True)
        ]
        return _gather(
            cast, ("dc",), leaf_layouts, [site_shape(layout, plan) for layout in leaf_layouts]
        )

    return map_by_group(gather, shards, layouts, lambda layout: shard_axes(layout)[1])


@jax.named_scope("gather_weights")
def gather_in_site(
    shards: Any, layouts: Any, plan: StepPlan, *, beside_compute: bool = False
) -> Any:
    """Gather inside the site: the second half of `gather_weights`; nothing crosses `dc`.

    Some `shards` may be quantized (see `geojax.step.fp8_all_gather`): those travel as they are.
    With `beside_compute` leaves that can share a message do, on a stream of its own.
    """

    def gather(
        site_axes: Any, leaves: list[Weight], leaf_layouts: list[LeafLayout]
    ) -> list[Weight]:
        sent = [
            _sent(leaf, layout, plan) for leaf, layout in zip(leaves, leaf_layouts, strict=True)
        ]
        if site_axes is not None:
            shapes = [layout.model_shard_shape for layout in leaf_layouts]
            sent = _gather(sent, site_axes, leaf_layouts, shapes, beside_compute=beside_compute)
        trimmed = [
            to_varying(
                leaf[tuple(slice(size) for size in layout.gathered_shape)],
                computing_axes(layout, plan),
            )
            for leaf, layout in zip(sent, leaf_layouts, strict=True)
        ]
        return [
            _received(leaf, gathered, layout, plan)
            if isinstance(leaf, QuantizedWeight)
            else gathered
            for leaf, gathered, layout in zip(leaves, trimmed, leaf_layouts, strict=True)
        ]

    return map_by_group(gather, shards, layouts, lambda layout: shard_axes(layout)[0])


def _sent(leaf: Weight, layout: LeafLayout, plan: StepPlan) -> jax.Array:
    """Cast a leaf to what is sent: FP8 numbers to plain bytes, which no backend widens."""
    if isinstance(leaf, QuantizedWeight):
        return lax.bitcast_convert_type(leaf.values, jnp.uint8)
    return leaf.astype(layout.gathered_dtype(plan.policy.compute_dtype))


def _received(
    leaf: QuantizedWeight, gathered: jax.Array, layout: LeafLayout, plan: StepPlan
) -> QuantizedWeight:
    """Make the quantized weight whose bytes are `gathered`, gathered from shards like `leaf`.

    Its scales are gathered here, where the shards have different ones.
    """
    scales, axes = leaf.scales, shard_axes(layout)[0]
    if axes is not None and scales_are_sent(scales.ndim, layout):
        shape = list(scales.shape)
        shape[shard_dim(layout)] *= math.prod(plan.mesh.shape[axis] for axis in axes)
        (scales,) = _gather([scales], axes, [layout], [tuple(shape)])
        blocks = (1,) * (gathered.ndim - 2) + (leaf.block or (1, 1))
        kept = [-(-size // block) for size, block in zip(gathered.shape, blocks, strict=True)]
        scales = scales[tuple(slice(size) for size in kept[: scales.ndim])]
    values = lax.bitcast_convert_type(gathered, leaf.values.dtype)
    made = dataclasses.replace(leaf, values=values, scales=scales)
    varying = sorted(varying_axes(values))
    return jax.tree.map(lambda x: to_varying(x, varying), made)


def scales_are_sent(dims: int, layout: LeafLayout) -> bool:
    """Return True if the shards of a quantized weight have different scales, an array of `dims`."""
    return shard_dim(layout) < dims


def computing_axes(layout: LeafLayout, plan: StepPlan) -> tuple[str, ...]:
    """Return the axes over which a gathered leaf varies, beside those that shard it and stages."""
    context = ("context",) if plan.mesh.shape["context"] > 1 else ()
    return (*plan.batch_axes, *context, *(("tensor",) if layout.partial else ()))


def _gather(
    leaves: list[jax.Array],
    axes: tuple[str, ...],
    leaf_layouts: list[LeafLayout],
    shapes: list[tuple[int, ...]],
    *,
    beside_compute: bool = False,
) -> list[jax.Array]:
    return all_gather(
        leaves,
        axes,
        dims=[shard_dim(layout) for layout in leaf_layouts],
        shapes=shapes,
        bucket_bytes=sys.maxsize if beside_compute else None,
        own_stream=beside_compute,
    )


def site_shape(layout: LeafLayout, plan: StepPlan) -> tuple[int, ...]:
    """Return the shape of a rank's block of a part, once it is gathered over `dc`."""
    shape = list(layout.model_shard_shape)
    shape[shard_dim(layout)] //= math.prod(
        plan.mesh.shape[axis] for axis in shard_axes(layout)[0] or ()
    )
    return tuple(shape)


@dataclasses.dataclass(frozen=True)
class GatheredWeights:
    """A source that gathers the weights of one layer from the shards of all of them (ZeRO 3)."""

    shards: Parameters
    """All layers of the model or of a chunk, stacked on a leading dim and gathered over `dc`."""
    first: int
    """The position of the source's first layer in the stack."""
    amax: Any
    """The `KernelAmax` of the source's layers; None: nothing is quantized here."""
    layouts: Any
    """The `LeafLayout`s of one layer."""
    plan: StepPlan

    def gather(self, index: jax.Array) -> Parameters:
        """Gather the weights of layer `index`, to be carried to its iteration."""
        own = _row_major(layer_slice(self.shards, self.first + index))
        if self.amax is not None:
            own = quantize_kernels(own, layer_slice(self.amax, index), self.plan)
        return gather_in_site(own, self.layouts, self.plan)

    def take(
        self, prefetched: Parameters, index: jax.Array, following: jax.Array
    ) -> tuple[Parameters, Parameters]:
        """Return the weights gathered one iteration ago, while those of the next one come."""
        return prefetched, self.gather(following)


@dataclasses.dataclass(frozen=True)
class WeightsWithAmax:
    """A source that hands each linear layer the amax of the steps before (see `amax_history`)."""

    source: WeightSource
    prev_amax: Any
    """The amax of the source's layers, stacked; None: there is no history."""

    def take(
        self, prefetched: Any, index: jax.Array, following: jax.Array
    ) -> tuple[Parameters, Any]:
        """Return the weights of layer `index` with their amax beside them."""
        weights, prefetched = self.source.take(prefetched, index, following)
        return attach_amax(weights, layer_slice(self.prev_amax, index)), prefetched


class StepWeights(NamedTuple):
    """The weights of a step."""

    non_layer_params: Parameters
    """The weights in no layer, gathered."""
    layers: list[LayerWeights]
    """The weights of the layers of each span of `StepPlan.matmul`, or of each layer."""
    zero: jax.Array
    """The zero of `zero_after`: it is known when all of them are gathered that will be at once."""


def step_weights(
    shards: Parameters, layouts: Parameters, model: AnyModel, plan: StepPlan, prev_amax: Any
) -> StepWeights:
    """Gather this rank's weights, or make the sources that gather them layer by layer.

    Leaves that are sharded over sites are gathered over `dc` here, and in no loop.

    Args:
        shards: this rank's shard of each parameter.
        layouts: the `LeafLayout` of each parameter.
        model: the model.
        plan: how the step runs.
        prev_amax: of each linear layer (see `geojax.step.amax_history`); None: no history.
    """
    non_layer_params = gather_weights(without_layers(shards), without_layers(layouts), plan)
    layers = gather_across_sites(shards["layers"], layouts["layers"], plan)
    shards_of_span: list[GatheredWeights | None] = []
    amax_of_span, gathered = [], []
    first = 0
    for count, matmul in plan.matmul.spans(model.num_stacked_layers):
        own, own_amax = _span(layers, first, count), _span(prev_amax, first, count)
        own_layouts = jax.tree.map(
            lambda layout, count=count: layout.of_layers(count), layouts["layers"]
        )
        follows = matmul.recipe == plan.policy.recipe
        source = None
        if plan.layout.zero.stage == 3 and follows:
            of_layer = jax.tree.map(LeafLayout.of_layer, layouts["layers"])
            amax = None
            if matmul.recipe is not None:
                amax = kernel_amax(own, own_layouts, plan, own_amax)
            source = GatheredWeights(layers, first, amax, of_layer, plan)
            gathered.append(source.gather(jnp.int32(0)))
        else:
            gathered.append(gather_layers(own, own_layouts, plan, own_amax, quantized=follows))
        shards_of_span.append(source)
        amax_of_span.append(own_amax)
        first += count
    (non_layer_params, gathered), zero = zero_after((non_layer_params, gathered))
    spans = [
        LayerWeights(WeightsWithAmax(StackedWeights(weights), own_amax))
        if source is None
        else LayerWeights(WeightsWithAmax(source, own_amax), prefetched=weights)
        for source, own_amax, weights in zip(shards_of_span, amax_of_span, gathered, strict=True)
    ]
    if not plan.scans_layers:
        spans = [
            LayerWeights(WeightsWithAmax(StackedWeights(weights, number), _span(amax, number, 1)))
            for weights, amax in zip(gathered, amax_of_span, strict=True)
            for number in range(len(jax.tree.leaves(weights)[0]))
        ]
    return StepWeights(non_layer_params, spans, zero)


def stage_weights(
    shards: Parameters, layouts: Parameters, plan: StepPlan, prev_amax: Any
) -> Parameters:
    """Gather all weights of this rank's stage of a pipeline; arguments as `step_weights`."""
    non_layer_params = gather_weights(without_layers(shards), without_layers(layouts), plan)
    own = gather_across_sites(shards["layers"], layouts["layers"], plan)
    layers = gather_layers(own, layouts["layers"], plan, prev_amax, quantized=True)
    return non_layer_params | {"layers": attach_amax(layers, prev_amax)}


def gather_layers(
    shards: Parameters, layouts: Any, plan: StepPlan, prev_amax: Any, *, quantized: bool
) -> Parameters:
    """Gather the weights of stacked layers inside the site; arguments as `shards_to_gather`."""
    own = shards_to_gather(shards, layouts, plan, prev_amax, quantized=quantized)
    return gather_in_site(own, layouts, plan)


def shards_to_gather(
    shards: Parameters, layouts: Any, plan: StepPlan, prev_amax: Any, *, quantized: bool
) -> Parameters:
    """Return the shards of stacked layers as they travel: in FP8, or in the dtype computed with.

    Args:
        shards: this rank's, not sharded over `dc`.
        layouts: the `LeafLayout` of each.
        plan: how the step runs.
        prev_amax: of the same layers (see `geojax.step.amax_history`); None: no history.
        quantized: kernels are quantized first where the policy has a recipe.
    """
    if quantized and plan.policy.recipe is not None:
        shards = quantize_kernels(shards, kernel_amax(shards, layouts, plan, prev_amax), plan)
    dtype = plan.policy.compute_dtype
    with jax.named_scope("gather_weights"):
        return jax.tree.map(
            lambda leaf, layout: (
                leaf if is_quantized_weight(leaf) else leaf.astype(layout.gathered_dtype(dtype))
            ),
            shards,
            layouts,
            is_leaf=is_quantized_weight,
        )


def without_layers(parameters: Parameters) -> Parameters:
    """Return the part of `parameters`, or of a tree like them, that is in no layer."""
    return {name: tree for name, tree in parameters.items() if name != "layers"}


def _row_major(tree: Any) -> Any:
    """Lay a layer's shards out as they are in the stack.

    A message has the gathered dim first, and XLA would else transpose whole stacks before the step,
    in float32, to have each layer's part in that order.
    """
    return jax.tree.map(
        lambda leaf: with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim)))), tree
    )


def _span(tree: Any, first: int, count: int) -> Any:
    """Cut `count` layers out of stacked ones, from `first` on."""
    return jax.tree.map(
        lambda leaf: leaf if len(leaf) == count else leaf[first : first + count], tree
    )
