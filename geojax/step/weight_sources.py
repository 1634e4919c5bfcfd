"""Sources of the weights that a step computes with: gathered once, or layer by layer (ZeRO 3).

The sources of `geojax.models.chunk.layer_io` for a state in shards. Layers with FP8
matmuls and layers with bf16 matmuls have sources of their own: kernels of the former are quantized
before they are gathered (`geojax.step.fp8_all_gather`). The few bf16 layers at the ends are
gathered once a step under ZeRO 3 too, as are the weights in no layer.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from geojax.collectives.axes import zero_after
from geojax.models import ModelConfig, Parameters
from geojax.models.chunk.layer_io import (
    LayerWeights,
    StackedWeights,
    WeightSource,
    layer_slice,
)
from geojax.precision import attach_amax, is_quantized_weight
from geojax.sharding import LeafLayout
from geojax.step.fp8_all_gather import kernel_amax, quantize_kernels
from geojax.step.gather import gather_across_sites, gather_in_site, gather_weights
from geojax.step.plan import StepPlan


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
    """The weights of the layers of each span of `StepPlan.matmul`."""
    zero: jax.Array
    """The zero of `zero_after`: it is known when all of them are gathered that will be at once."""


def step_weights(
    shards: Parameters, layouts: Parameters, model: ModelConfig, plan: StepPlan, prev_amax: Any
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
