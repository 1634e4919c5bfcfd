"""Where the weights of a step's passes come from: gathered once, or layer by layer (ZeRO 3).

The sources of `geojax.models.chunk.layer_io` for a state in shards. Layers that multiply in
different ways have sources of their own: kernels that follow an FP8 recipe are rounded before they
are gathered (`geojax.step.fp8_all_gather`), others are not. Layers that a recipe leaves plain, a
few at the ends, are gathered once a step under ZeRO 3 too, as is what is in no layer.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.models import ModelConfig, Parameters
from geojax.models.chunk.layer_io import (
    LayerWeights,
    StackedWeights,
    WeightSource,
    layer_slice,
)
from geojax.optim import LeafLayout
from geojax.step.amax_history import attach
from geojax.step.fp8_all_gather import kernel_amax, quantize_kernels
from geojax.step.gather import gather_across_sites, gather_in_site, gather_weights
from geojax.step.plan import StepPlan


@dataclasses.dataclass(frozen=True)
class GatheredWeights:
    """A source that gathers the weights of one layer from the shards of all of them (ZeRO 3)."""

    shards: Parameters
    """Of all the model's layers, stacked on a leading dim; nothing is at another site alone."""
    first: int
    """The number of the source's first layer in the model."""
    magnitudes: Any
    """Of the source's layers (see `geojax.step.fp8_all_gather`); None: nothing is rounded."""
    layouts: Any
    """Of one layer."""
    plan: StepPlan

    def gather(self, index: jax.Array) -> Parameters:
        """The weights of layer `index`: what is carried to its turn."""
        own = layer_slice(self.shards, self.first + index)
        if self.magnitudes is not None:
            own = quantize_kernels(own, layer_slice(self.magnitudes, index), self.plan)
        return gather_in_site(own, self.layouts, self.plan)

    def take(
        self, prefetched: Parameters, index: jax.Array, following: jax.Array
    ) -> tuple[Parameters, Parameters]:
        """Return the weights gathered one iteration ago, while those of the next one come."""
        return prefetched, self.gather(following)


@dataclasses.dataclass(frozen=True)
class ExpectantWeights:
    """A source that tells each linear layer which magnitudes to expect (see `amax_history`)."""

    source: WeightSource
    expected: Any
    """Of the source's layers, stacked; None: nothing."""

    def take(
        self, prefetched: Any, index: jax.Array, following: jax.Array
    ) -> tuple[Parameters, Any]:
        """Return the weights of layer `index`, with what is expected beside them."""
        weights, prefetched = self.source.take(prefetched, index, following)
        return attach(weights, layer_slice(self.expected, index)), prefetched


class StepWeights(NamedTuple):
    """The weights of a step."""

    non_layer_params: Parameters
    """The weights in no layer, gathered."""
    layers: list[LayerWeights]
    """Those of the layers of each span of `StepPlan.matmul`."""


def step_weights(
    shards: Parameters, layouts: Parameters, model: ModelConfig, plan: StepPlan, expected: Any
) -> StepWeights:
    """This rank's weights, as the passes of a step read them.

    What is cut over sites is gathered between them here, and in no loop.

    Args:
        shards: this rank's shard of each parameter.
        layouts: the `LeafLayout` of each parameter.
        model: the model.
        plan: how the step runs.
        expected: magnitudes for each linear layer (see `geojax.step.amax_history`); None: none.
    """
    non_layer_params = gather_weights(without_layers(shards), without_layers(layouts), plan)
    layers = gather_across_sites(shards["layers"], layouts["layers"], plan)
    spans: list[LayerWeights] = []
    first = 0
    for count, matmul in plan.matmul.spans(model.num_hidden_layers):
        own, known = _rows(layers, first, count), _rows(expected, first, count)
        places = jax.tree.map(lambda place, count=count: place.of_layers(count), layouts["layers"])
        follows = matmul.recipe == plan.policy.recipe
        magnitudes = kernel_amax(own, places, plan, known) if follows else None
        source: WeightSource
        prefetched = None
        if plan.zero_stage == 3 and follows:
            of_layer = jax.tree.map(LeafLayout.of_layer, layouts["layers"])
            source = GatheredWeights(layers, first, magnitudes, of_layer, plan)
            prefetched = source.gather(jnp.int32(0))
        else:
            if magnitudes is not None:
                own = quantize_kernels(own, magnitudes, plan)
            source = StackedWeights(gather_in_site(own, places, plan))
        spans.append(LayerWeights(ExpectantWeights(source, known), prefetched))
        first += count
    return StepWeights(non_layer_params, spans)


def stage_weights(
    shards: Parameters, layouts: Parameters, plan: StepPlan, expected: Any
) -> Parameters:
    """All weights of this rank's stage of a pipeline, gathered; arguments as `step_weights`."""
    outer = gather_weights(without_layers(shards), without_layers(layouts), plan)
    own, places = gather_across_sites(shards["layers"], layouts["layers"], plan), layouts["layers"]
    own = quantize_kernels(own, kernel_amax(own, places, plan, expected), plan)
    return outer | {"layers": attach(gather_in_site(own, places, plan), expected)}


def without_layers(parameters: Parameters) -> Parameters:
    """What of `parameters` (or of a tree like them) is in no layer."""
    return {name: tree for name, tree in parameters.items() if name != "layers"}


def _rows(tree: Any, first: int, count: int) -> Any:
    """`count` layers of stacked ones, from `first` on."""
    return jax.tree.map(
        lambda leaf: leaf if len(leaf) == count else leaf[first : first + count], tree
    )
