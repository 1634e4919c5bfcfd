"""A chunk of a model: consecutive layers, with the embedding before or the head behind them.

    forward             x  ─► (embedding) ─► layers ─► y          and residuals
    backward            dx ◄─ (embedding) ◄─ layers ◄─ (head) ◄─ dy  and gradients
    input_gradient      the same without the gradients of the layers' weights,
    weight_gradients    which come here, at any later time

Every pass is a function of arrays and may stand in a program of its own, inside a `jax.jit` or a
`jax.shard_map`. One program returns pytrees that the next one takes: residuals, and the values that
`input_gradient` stashes for `weight_gradients`. The plain training step, the stages of a pipeline
and the measurement of stage times run the passes of this class.

The head runs in the backward, forwards and backwards at once: the last chunk's forward ends with
the stream, and its logits are never kept.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.collectives.axes import vary_over, varying_axes
from geojax.models.chunk.layer_io import GradientSink, LayerWeights
from geojax.models.chunk.layer_scan import Layer, Layers
from geojax.models.chunk.residuals import Residuals, forward
from geojax.models.declaration import Parameters
from geojax.models.frozen import split_trained

Microbatch = Any
"""A pytree of arrays whose leading dim counts sequences."""


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """The pieces of a model; inside a `shard_map` they get this rank's parts."""

    embed: Callable[[Parameters, Microbatch], jax.Array]
    """(the weights of the first chunk, a microbatch) to the stream before the first layer."""
    layer: Layer
    """One layer, under whatever rematerialization."""
    head: Callable[[Parameters, jax.Array, Microbatch], jax.Array]
    """(the weights of the last chunk, the stream after the last layer, a microbatch) to the sum of
    the losses."""
    context: Callable[[Microbatch], Any] = lambda microbatch: None
    """A microbatch to all that every layer reads of it and is not differentiated in: tables, masks,
    keys."""
    balance: Callable[[jax.Array, Microbatch], jax.Array] | None = None
    """(the balance losses of a chunk's layers [B], a microbatch) to what they add to the loss:
    linear. None where layers have none."""

    embed_sums: Callable[[Parameters, Microbatch, jax.Array, Parameters], Parameters] | None = None
    """(the first chunk's weights, a microbatch, the cotangent of the stream, sums of gradients) to
    the sums with the gradients, added to tables in place. None: they are added as a whole."""
    head_share: Callable[[Microbatch, int, jax.Array, jax.Array], Microbatch] | None = None
    """(a microbatch, a number of shares, the number of one, True if it counts) to what the head
    reads of the microbatch for a share of its positions. None: the head needs all of them."""

    def scaled(self, scale: Callable[[jax.Array], jax.Array]) -> "ModelFunctions":
        """Return the functions with `scale` applied to what they add to the loss."""

        def head(last: Parameters, x: jax.Array, batch: Microbatch) -> jax.Array:
            return scale(self.head(last, x, batch))

        def balance(losses: jax.Array, batch: Microbatch) -> jax.Array:
            assert self.balance is not None, "balance losses need a weight in the loss"
            return scale(self.balance(losses, batch))

        weighted = None if self.balance is None else balance
        return dataclasses.replace(self, head=head, balance=weighted)

    @jax.named_scope("head")
    def head_gradients(self, last: Parameters, x: jax.Array, batch: Microbatch) -> "HeadGradients":
        """Run the head forwards and backwards, from the stream `x` after the last layer."""
        split = split_trained(last)
        loss, backward = jax.vjp(
            lambda own, x: self.head(split.merge(own), x, batch), split.trained, x
        )
        return HeadGradients(loss, *backward(jnp.ones_like(loss)))

    @jax.named_scope("embedding")
    def embed_forward(self, first: Parameters, batch: Microbatch) -> tuple[jax.Array, Residuals]:
        """Run the embedding; `embed_gradients` takes the residuals."""
        split = split_trained(first)
        return forward(
            lambda own: self.embed(split.merge(own), batch), split.trained, again=(first, batch)
        )

    @jax.named_scope("embedding")
    def embed_gradients(
        self, first: Parameters, residuals: Residuals, cotangent: jax.Array, batch: Microbatch
    ) -> Parameters:
        """Run the embedding backwards: the gradients of its weights."""
        (gradients,) = residuals.backward(cotangent, again=(first, batch))
        made: Parameters = gradients
        return made

    def balance_cotangent(self, balance: jax.Array | None, batch: Microbatch) -> jax.Array | None:
        """Return the cotangent of the balance losses; it does not depend on their values."""
        if balance is None or self.balance is None:
            return None
        weigh = self.balance
        value, backward = jax.vjp(lambda losses: weigh(losses, batch), balance)
        (cotangent,) = backward(jnp.ones_like(value))
        return vary_over(cotangent, varying_axes(balance))


class HeadGradients(NamedTuple):
    """The results of the head, forwards and backwards."""

    loss: jax.Array
    """The sum of the losses."""
    weights: Parameters
    """The gradients of the head's weights."""
    x: jax.Array
    """The cotangent of the stream after the last layer."""


class ChunkWeights(NamedTuple):
    """The weights of a chunk."""

    first: Parameters
    """Weights that the embedding reads; {} where the chunk is not the first."""
    layers: Sequence[LayerWeights]
    """Weights of the layers of each span."""
    last: Parameters
    """Weights that the head reads; {} where the chunk is not the last."""


class ChunkResiduals(NamedTuple):
    """The results of a chunk's forward that its backward reads; a pytree."""

    layers: list[Any]
    """The residuals of each span, as the chunk's store keeps them."""
    balance: jax.Array | None
    """The sum of the layers' balance losses, [B]; None without experts."""
    embedding: Residuals | None = None
    """The residuals of the embedding; None where the chunk is not the first."""
    output: jax.Array | None = None
    """The stream after the last layer, for the head; None where the chunk is not the last."""


class ChunkForward(NamedTuple):
    """The results of a chunk's forward."""

    x: jax.Array
    """The stream after the chunk."""
    balance_loss: jax.Array | None
    """The share of the layers' balance losses in the loss; None without experts."""
    residuals: ChunkResiduals
    weights: ChunkWeights
    """The weights for the backward in the same program: kept, or prefetched for it."""
    prefetched: list[Any]
    """The weights that sources of kept weights prefetched for the next forward; None for others."""


class ChunkBackward(NamedTuple):
    """The results of a chunk's backward."""

    x: jax.Array
    """The cotangent of the stream before the chunk's first layer."""
    layers: Any
    """The sink's sums with the gradients of the layers; from `input_gradient`, the stash that
    `weight_gradients` takes: a pytree."""
    first: Parameters
    """The gradients of the embedding's weights; {} where the chunk is not the first."""
    last: Parameters
    """The gradients of the head's weights; {} where the chunk is not the last."""
    loss: jax.Array | None
    """The sum of the losses; None where the chunk is not the last."""
    prefetched: list[Any]
    """The weights that each source prefetched for the next forward; [] from `input_gradient`."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A run of consecutive layers, with the embedding if it is the first and the head if the last.

    The arguments that passes have in common: `weights` of the chunk, a microbatch `batch`, and
    `context`, which is `functions.context(batch)`.
    """

    functions: ModelFunctions
    """The pieces of the model."""
    layers: Layers
    """The chunk's layers."""
    is_first: bool = False
    """True if the chunk begins with the embedding."""
    is_last: bool = False
    """True if the chunk ends with the head."""

    def stacked_weights(
        self, first: Parameters, layers: Parameters, last: Parameters
    ) -> ChunkWeights:
        """Return the weights of a chunk whose layers are stacked on a leading dim."""
        return ChunkWeights(first, self.layers.stacked_weights(layers), last)

    def forward(
        self,
        weights: ChunkWeights,
        x: jax.Array | None,
        batch: Microbatch,
        context: Any,
        *,
        keep_weights: bool = False,
        balance: jax.Array | None = None,
    ) -> ChunkForward:
        """Run the chunk forwards.

        Args:
            weights: see the class.
            x: the stream from the chunk before; None: this is the first one.
            batch: see the class.
            context: see the class.
            keep_weights: keep weights that are gathered layer by layer for the backward.
            balance: zeros typed as a layer's balance losses, where the number of layers is traced.
        """
        embedding = None
        if self.is_first:
            x, embedding = self.functions.embed_forward(weights.first, batch)
        assert x is not None, "a chunk that is not the first must have a stream"
        made = self.layers.forward(
            weights.layers, x, context, keep_weights=keep_weights, balance=balance
        )
        output = made.x if self.is_last else None
        residuals = ChunkResiduals(made.residuals, made.balance, embedding, output)
        added = None
        if made.balance is not None and self.functions.balance is not None:
            added = self.functions.balance(made.balance, batch)
        behind = weights._replace(layers=made.weights)
        return ChunkForward(made.x, added, residuals, behind, made.prefetched)

    def forward_only(
        self, weights: ChunkWeights, x: jax.Array | None, batch: Microbatch, context: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """Run the chunk forwards and keep nothing; differentiable where weights are stacked.

        Returns:
            The stream, or of the last chunk the sum of the losses; and the sum of the layers'
            balance losses, [B], None without experts or where the number of layers is traced.
        """
        if self.is_first:
            x = self.functions.embed(weights.first, batch)
        assert x is not None, "a chunk that is not the first must have a stream"
        x, balance = self.layers.forward_only(weights.layers, x, context)
        if self.is_last:
            return self.functions.head(weights.last, x, batch), balance
        return x, balance

    def backward(
        self,
        weights: ChunkWeights,
        residuals: ChunkResiduals,
        cotangent: jax.Array | None,
        batch: Microbatch,
        context: Any,
        sink: GradientSink,
        sums: Any,
        *,
        bucket_layers: int = 1,
    ) -> ChunkBackward:
        """Run the chunk backwards.

        Args:
            weights: see the class.
            residuals: of the forward.
            cotangent: of the forward's stream; None: this is the last chunk.
            batch: see the class.
            context: see the class.
            sink: takes the gradients of the layers.
            sums: the sink's, so far.
            bucket_layers: layers whose gradients `sink` takes together.
        """
        head = self._head(weights, residuals, cotangent, batch)
        cotangents = head.x, self.functions.balance_cotangent(residuals.balance, batch)
        made = self.layers.backward(
            weights.layers,
            residuals.layers,
            cotangents,
            context,
            sink,
            sums,
            bucket_layers=bucket_layers,
        )
        first = self._embedding(weights, residuals, made.x, batch)
        return ChunkBackward(made.x, made.sums, first, head.weights, head.loss, made.prefetched)

    def input_gradient(
        self,
        weights: ChunkWeights,
        residuals: ChunkResiduals,
        cotangent: jax.Array | None,
        batch: Microbatch,
        context: Any,
    ) -> ChunkBackward:
        """Run the chunk backwards, but for the gradients of the layers' weights.

        Arguments are those of `backward`.
        """
        head = self._head(weights, residuals, cotangent, batch)
        cotangents = head.x, self.functions.balance_cotangent(residuals.balance, batch)
        x, stashed = self.layers.input_gradients(
            weights.layers, residuals.layers, cotangents, context
        )
        first = self._embedding(weights, residuals, x, batch)
        return ChunkBackward(x, stashed, first, head.weights, head.loss, [])

    def weight_gradients(
        self,
        weights: ChunkWeights,
        residuals: ChunkResiduals,
        stashed: list[Any],
        context: Any,
        sink: GradientSink,
        sums: Any,
    ) -> Any:
        """Return the sink's sums with the gradients of the layers' weights.

        `stashed` is `ChunkBackward.layers` of `input_gradient`.
        """
        return self.layers.weight_gradients(
            weights.layers, residuals.layers, stashed, context, sink, sums
        )

    def _head(
        self,
        weights: ChunkWeights,
        residuals: ChunkResiduals,
        cotangent: jax.Array | None,
        batch: Microbatch,
    ) -> "_Head":
        if not self.is_last:
            assert cotangent is not None, "a chunk that is not the last must have a cotangent"
            return _Head(None, {}, cotangent)
        assert residuals.output is not None, "the last chunk's forward keeps its stream"
        return _Head(*self.functions.head_gradients(weights.last, residuals.output, batch))

    def _embedding(
        self,
        weights: ChunkWeights,
        residuals: ChunkResiduals,
        cotangent: jax.Array,
        batch: Microbatch,
    ) -> Parameters:
        if residuals.embedding is None:
            return {}
        return self.functions.embed_gradients(weights.first, residuals.embedding, cotangent, batch)


class _Head(NamedTuple):
    loss: jax.Array | None
    weights: Parameters
    x: jax.Array
