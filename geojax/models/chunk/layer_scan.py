"""The layers of a model forwards and backwards, as two loops with explicit residuals.

    forward_layers    x  ─► layer 0 ─► layer 1 ─► ... ─► x
                            │ residuals   │ residuals
    backward_layers  dx  ◄─ layer 0 ◄─ layer 1 ◄─ ... ◄─ dx
                            │ gradient    │ gradient

Where a layer's weights come from and where its gradient goes are said by two small objects, a
`WeightSource` and a `GradientSink`; the loops are the same for whole weights and for weights that
are gathered layer by layer. Both objects may leave something for the next turn of the loop (the
weights of the next layer, the gradient of the last one), so that a message can travel while a
layer is computed that does not wait for it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.models.chunk.residuals import Residuals, forward
from geojax.models.parallel.varying import zeros_of
from geojax.models.parameters import Parameters
from geojax.precision import accumulate, merge_quantized, split_quantized

Layer = Callable[[Parameters, jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array | None]]
"""(a layer's parameters, the stream, the layer's number, the context) to the stream and the layer's
balance loss [rows], None without experts."""


class WeightSource(Protocol):
    """Gives out the weights of one layer after the other."""

    def take(self, ahead: Any, index: jax.Array, following: jax.Array) -> tuple[Parameters, Any]:
        """The weights of layer `index`, and what is carried to the turn of layer `following`.

        `ahead` is what was carried to this turn.
        """


class GradientSink(Protocol):
    """Takes the gradients of the layers, those of a turn of the loop together."""

    @property
    def turns_to_fill(self) -> int:
        """After so many turns the structure of the sums stays as it is."""

    def put(self, sums: Any, first: jax.Array, gradients: Parameters) -> Any:
        """`sums` with the gradients in them, or on their way into them.

        `gradients` are those of the layers from `first` on, stacked.
        """


@dataclasses.dataclass(frozen=True)
class StackedWeights:
    """A source that holds the weights of its layers, stacked on a leading dim."""

    weights: Parameters

    def take(self, ahead: None, index: jax.Array, following: jax.Array) -> tuple[Parameters, None]:
        """A slice of the stack; nothing is carried."""
        return layer_slice(self.weights, index), None


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive layers that one function computes, with weights of one kind."""

    count: int
    layer: Layer
    source: WeightSource
    """Of their weights; it numbers the span's layers from 0."""


@dataclasses.dataclass(frozen=True)
class StackedGradients:
    """A sink that adds to the gradients of all layers, stacked on a leading dim."""

    dtype: Any
    """Of the sums."""
    once: bool = False
    """Whether each layer's gradient comes only once: it is written then, not added."""

    turns_to_fill = 0

    def start(self, layer: Parameters, count: int) -> Parameters:
        """Sums of nothing, for `count` layers whose weights have the types of `layer`."""
        return zeros_of(layer, count, dtype=self.dtype)

    def put(self, sums: Parameters, first: jax.Array, gradients: Parameters) -> Parameters:
        """In place, if nobody else reads the sums."""
        return add_at(sums, first, gradients, empty=self.once)

    def finish(self, sums: Parameters) -> Parameters:
        """The stacked gradients."""
        return sums


class Forward(NamedTuple):
    """What `forward_layers` returns."""

    x: jax.Array
    """The stream after the last layer."""
    balance: jax.Array | None
    """[rows], the balance losses of all layers; None without experts."""
    residuals: list[Residuals]
    """Of each span, stacked."""
    ahead: list[Any]
    """What each span's source carries to the layer that comes next."""
    weights: list[Any]
    """Of each span those of every layer, stacked; None unless they were to be kept."""


@jax.named_scope("forward_layers")
def forward_layers(
    spans: Sequence[Span],
    ahead: Sequence[Any],
    x: jax.Array,
    context: Any,
    *,
    first_layer: jax.Array | int = 0,
    keep_weights: bool = False,
) -> Forward:
    """`x` through the layers of all `spans`, one loop for each.

    Args:
        spans: the functions of the layers, under whatever rematerialisation, and their weights.
        ahead: what each span's source carries to its first layer; None: nothing.
        x: the stream before the first layer, typed as varying as it is after a layer.
        context: what every layer reads beside; given to `backward_layers` again.
        first_layer: the number of the first of them in the whole model.
        keep_weights: whether to return the weights of the layers whose sources carry any; such a
            source then carries those of its first layer out of the loop, else of its last one, with
            which the backward begins.
    """

    def body(
        span: Span, first: int, keep: bool, carry: tuple[jax.Array, Any], index: jax.Array
    ) -> tuple[tuple[jax.Array, Any], Any]:
        x, ahead = carry
        following = (index + 1) % span.count if keep else jnp.minimum(index + 1, span.count - 1)
        weights, ahead = span.source.take(ahead, index, following)
        again = (weights, first_layer + first + index, context)
        (x, balance), residuals = forward_layer(span.layer, x, again)
        return (x, ahead), (balance, residuals, weights if keep else None)

    made, behind, first = [], [], 0
    for span, own in zip(spans, ahead, strict=True):
        keep = keep_weights and own is not None
        indices = jnp.arange(span.count, dtype=jnp.int32)
        (x, own), of_span = lax.scan(functools.partial(body, span, first, keep), (x, own), indices)
        made.append(of_span)
        behind.append(own)
        first += span.count
    balances, residuals, weights = zip(*made, strict=True)
    balance = None
    if balances[0] is not None:
        balance = functools.reduce(jnp.add, [each.sum(axis=0) for each in balances])
    return Forward(x, balance, list(residuals), behind, list(weights))


def forward_layer(
    layer: Layer, x: jax.Array, again: tuple[Parameters, jax.Array, Any]
) -> tuple[tuple[jax.Array, jax.Array | None], Residuals]:
    """One layer on the stream `x`: what it returns, and what its backward needs.

    `again` are its weights, its number and the context, which the backward is given once more; it
    then returns the gradients of the weights in the compute dtype, of rounded ones too.
    """
    rounded, trained = split_quantized(again[0])
    return forward(
        lambda own, x: layer(merge_quantized(rounded, own), x, *again[1:]), trained, x, again=again
    )


def _together(*stacks: jax.Array) -> jax.Array:
    return stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)


class Backward(NamedTuple):
    """What `backward_layers` returns."""

    x: jax.Array
    """The cotangent of the stream before the first layer."""
    sums: Any
    """The sink's sums with every layer's gradient."""
    ahead: list[Any]
    """What each source carries to the layer that comes next: its first one."""


@jax.named_scope("backward_layers")
def backward_layers(
    sources: Sequence[WeightSource],
    ahead: Sequence[Any],
    sink: GradientSink,
    sums: Any,
    residuals: Sequence[Residuals],
    cotangents: tuple[jax.Array, jax.Array | None],
    context: Any,
    counts: Sequence[int],
    *,
    first_layer: jax.Array | int = 0,
    together: int = 1,
) -> Backward:
    """The layers of `forward_layers`, backwards.

    Args:
        sources: of the same weights, one for each span.
        ahead: what each source carries to its last layer; None: nothing.
        sink: takes the gradient of every layer.
        sums: the sink's, so far.
        residuals: of each span.
        cotangents: of the stream after the last layer and of the balance loss.
        context: as in the forward.
        counts: the layers of each span.
        first_layer: as in the forward.
        together: the layers of a turn, whose gradients `sink` takes together; divides the number
            of all layers.
    """
    x_cotangent, balance_cotangent = cotangents

    ends = list(itertools.accumulate(counts))
    starts = [0, *ends[:-1]]

    def of_layer(
        span: int, carry: tuple[jax.Array, Any], index: jax.Array
    ) -> tuple[tuple[jax.Array, Any], Parameters]:
        x_cotangent, ahead = carry
        weights, ahead = sources[span].take(ahead, index, jnp.maximum(index - 1, 0))
        number = first_layer + starts[span] + index
        gradient, x_cotangent = layer_slice(residuals[span], index).backward(
            (x_cotangent, balance_cotangent), again=(weights, number, context)
        )
        return (x_cotangent, ahead), gradient

    def turn(
        pieces: Sequence[tuple[int, int]], carry: tuple[Any, Any], indices: jax.Array
    ) -> tuple[Any, None]:
        (x_cotangent, ahead), sums = carry
        ahead = list(ahead)
        gradients: list[Parameters] = []
        end = together
        for span, length in reversed(pieces):
            own = indices[end - length : end] - starts[span]
            (x_cotangent, ahead[span]), made = lax.scan(
                functools.partial(of_layer, span),
                (x_cotangent, ahead[span]),
                own,
                reverse=True,
                unroll=length == 1,
            )
            gradients.insert(0, made)
            end -= length
        return (
            (x_cotangent, ahead),
            sink.put(sums, indices[0], jax.tree.map(_together, *gradients)),
        ), None

    turns = np.arange(ends[-1], dtype=np.int32).reshape(-1, together)
    in_loop = max(len(turns) - sink.turns_to_fill, 0)
    carry = ((x_cotangent, list(ahead)), sums)
    for number in reversed(range(in_loop, len(turns))):
        carry, _ = turn(_pieces(turns[number], starts, ends), carry, jnp.asarray(turns[number]))
    loops = itertools.groupby(turns[:in_loop], key=lambda own: _pieces(own, starts, ends))
    for pieces, members in reversed([(pieces, list(members)) for pieces, members in loops]):
        indices = jnp.asarray(np.stack(members))
        carry, _ = lax.scan(functools.partial(turn, pieces), carry, indices, reverse=True)
    (x, ahead), sums = carry
    return Backward(x, sums, ahead)


def _pieces(
    indices: np.ndarray, starts: Sequence[int], ends: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The spans that consecutive layers belong to, and how many of them to each."""
    first, last = indices[0], indices[-1]
    overlaps = (
        min(end, last + 1) - max(start, first) for start, end in zip(starts, ends, strict=True)
    )
    return tuple((span, int(count)) for span, count in enumerate(overlaps) if count > 0)


def layer_slice(stacked: Any, index: jax.Array | int) -> Any:
    """One layer of a tree whose leaves have a leading layers dim."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(
            leaf, index, keepdims=False, allow_negative_indices=False
        ),
        stacked,
    )


def layers_slice(stacked: Any, first: jax.Array, count: int) -> Any:
    """`count` layers, from `first` on, of a tree whose leaves have a leading layers dim."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_slice_in_dim(leaf, first, count, allow_negative_indices=False),
        stacked,
    )


def add_at(sums: Any, first: jax.Array, tree: Any, *, empty: bool = False) -> Any:
    """`tree`, stacked layers from `first` on, added to those layers of `sums`, in its dtypes (see
    `geojax.precision.accumulate`).

    If `sums` are `empty` there, it is written.
    """
    if not empty:
        held = jax.tree.map(
            lambda total, leaf: layers_slice(total, first, leaf.shape[0]), sums, tree
        )
        tree = accumulate(held, tree)

    def write(total: jax.Array, leaf: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(
            total, leaf.astype(total.dtype), first, axis=0, allow_negative_indices=False
        )

    return jax.tree.map(write, sums, tree)
