"""The loops over the layers of a chunk, with explicit residuals.

    forward     x  ─► layer 0 ─► layer 1 ─► ... ─► x
                      │ residuals   │ residuals
    backward   dx  ◄─ layer 0 ◄─ layer 1 ◄─ ... ◄─ dx
                      │ gradient    │ gradient

A backward may be split: `input_gradients` is the loop over layers that gives dx, and leaves for
each layer what `weight_gradients`, at any later time, makes the gradients of.

Layers lie in *spans*, consecutive ones that one function computes. A span's number of layers is
static and its loop a `lax.scan`; a single span may also have a number that only the running program
knows, in a `fori_loop`. Layers may be unrolled: each is a span of its own, in no loop, and what it
keeps is in no stack. What a loop prefetches, stores and reduces is up to its weight sources,
stores and sinks (`geojax.models.chunk.layer_io`): a message can travel while a layer is computed
that does not wait for it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.collectives import after, barrier
from geojax.collectives.axes import typed_like, unwritten, vary_over, varying_axes, zero_after
from geojax.models.chunk.layer_io import (
    GradientSink,
    LayerStore,
    LayerWeights,
    StackedStore,
    StackedWeights,
    StashStore,
    layer_slice,
)
from geojax.models.chunk.residuals import Residuals, forward
from geojax.models.chunk.split_backward import SplitBackward
from geojax.models.declaration import Parameters
from geojax.models.frozen import split_trained

Layer = Callable[[Parameters, jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array | None]]
"""(a layer's parameters, the stream, the layer's number, the context) to the stream and the layer's
balance loss [B], None without experts."""

Cotangents = tuple[jax.Array, jax.Array | None]
"""The cotangents of the stream after the last layer, and of the balance losses."""


@dataclasses.dataclass(frozen=True)
class LayerSpan:
    """Consecutive layers that one function computes, with weights of one kind."""

    count: int | jax.Array
    """The number of layers; an array where only the running program knows it."""
    layer: Layer
    """One layer, under whatever rematerialization."""


class Forward(NamedTuple):
    """The results of `Layers.forward`."""

    x: jax.Array
    """The stream after the last layer."""
    balance: jax.Array | None
    """The sum of the layers' balance losses, [B]; None without experts."""
    residuals: list[Any]
    """The residuals of each span, as the store keeps them."""
    weights: list[LayerWeights]
    """The weights of each span for the backward pass."""
    prefetched: list[Any]
    """The weights that sources of kept weights prefetched for the next forward pass; None for the
    others, which prefetched for the backward pass."""


class Backward(NamedTuple):
    """The results of `Layers.backward`."""

    x: jax.Array
    """The cotangent of the stream before the first layer."""
    sums: Any
    """The sink's sums with every layer's gradient."""
    prefetched: list[Any]
    """The weights that each source prefetched for its first layer."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """Consecutive layers of a model, and the loops over them."""

    spans: tuple[LayerSpan, ...]
    """The layers, in spans."""
    first_layer: int | jax.Array = 0
    """The number of the first of them in the whole model."""
    store: LayerStore = dataclasses.field(default_factory=StackedStore)
    """Keeps the residuals of each layer."""
    stash_store: StashStore = dataclasses.field(default_factory=StackedStore)
    """Keeps the stash of each layer's split backward."""
    split: SplitBackward | None = None
    """The two halves of a layer's backward; None: it is split where it is traced."""
    is_unrolled: bool = False
    """True if each layer is a span of its own."""

    @property
    def unrolled(self) -> "Layers":
        """The same layers, each a span of its own."""
        spans = [LayerSpan(1, span.layer) for span in self.spans for _ in range(int(span.count))]
        return dataclasses.replace(self, spans=tuple(spans), is_unrolled=True)

    def stacked_weights(self, stacked: Parameters) -> list[LayerWeights]:
        """Return the weights of each span, of layers that are stacked on a leading dim."""
        return [LayerWeights(StackedWeights(stacked, first)) for first in self._firsts]

    @jax.named_scope("forward_layers")
    def forward(
        self,
        weights: Sequence[LayerWeights],
        x: jax.Array,
        context: Any,
        *,
        keep_weights: bool = False,
        balance: jax.Array | None = None,
    ) -> Forward:
        """Run `x` through all layers, one loop for each span.

        Args:
            weights: the weights of each span.
            x: the stream before the first layer, typed as varying as it is after a layer.
            context: what every layer reads beside; given to the backward again.
            keep_weights: keep the weights of sources that prefetch for the backward pass; such a
                source prefetches its first layer at the end, the others their last one.
            balance: zeros typed as a layer's balance losses, where the number of layers is traced.
        """

        def body(
            span: LayerSpan, own: LayerWeights, first: int, keep: bool, carry: Any, index: Any
        ) -> Any:
            x, total, prefetched, stored = carry
            following = (index + 1) % span.count if keep else jnp.minimum(index + 1, span.count - 1)
            weights, prefetched = own.source.take(prefetched, index, following)
            again = (weights, self.first_layer + first + index, context)
            (made, balance), residuals = forward_layer(span.layer, x, again)
            stored, stacked = self.store.put(stored, index, residuals)
            if total is not None:
                total, balance = typed_like(total + balance, total), None
            carry = (typed_like(made, x), total, prefetched, stored)
            return carry, (balance, stacked, weights if keep else None)

        balances, residuals, for_backward, for_next_forward = [], [], [], []
        for span, own, first in zip(self.spans, weights, self._firsts, strict=True):
            keep = keep_weights and own.prefetched is not None
            of_span = functools.partial(body, span, own, first, keep)
            carry = (x, balance, own.prefetched, self.store.start())
            (x, balance, prefetched, stored), stacked = _loop(of_span, carry, span.count)
            of_layers, residuals_of_layers, kept = stacked
            balances.append(of_layers)
            residuals.append(residuals_of_layers if stored is None else stored)
            for_backward.append(
                LayerWeights(StackedWeights(kept)) if keep else own._replace(prefetched=prefetched)
            )
            for_next_forward.append(prefetched if keep else None)
        if balance is None:
            balance = _sum_over_layers(balances)
        return Forward(x, balance, residuals, for_backward, for_next_forward)

    @jax.named_scope("forward_layers")
    def forward_only(
        self, weights: Sequence[LayerWeights], x: jax.Array, context: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """Run `x` through all layers and keep nothing; arguments are those of `forward`.

        Differentiable in the stream and in stacked weights.

        Returns:
            The stream after the last layer; and the sum of the layers' balance losses, [B], None
            without experts or where the number of layers is traced.
        """

        def body(
            span: LayerSpan,
            own: LayerWeights,
            first: int,
            carry: Any,
            index: Any,
            scanned: Any = None,
        ) -> Any:
            x, prefetched = carry
            if scanned is None:
                following = jnp.minimum(index + 1, span.count - 1)
                weights, prefetched = own.source.take(prefetched, index, following)
                number = self.first_layer + first + index
            else:
                weights, number = scanned
            made, balance = span.layer(weights, x, number, context)
            static = isinstance(span.count, int)
            return (typed_like(made, x), prefetched), balance if static else None

        balances = []
        for span, own, first in zip(self.spans, weights, self._firsts, strict=True):
            of_span, scanned = functools.partial(body, span, own, first), None
            if isinstance(own.source, StackedWeights) and isinstance(span.count, int):
                # The gradients of what is scanned are stacked, not added up in every iteration; and
                # a layer's number is no residual of its iteration.
                numbers = self.first_layer + first + jnp.arange(span.count, dtype=jnp.int32)
                scanned = (own.source.stack(span.count), numbers)
                # A layer's result is summed over `tensor`, and varies as its weights do else.
                x = vary_over(x, varying_axes(scanned) - {"tensor"})
            (x, _), of_layers = _loop(of_span, (x, own.prefetched), span.count, scanned=scanned)
            balances.append(of_layers)
        return x, _sum_over_layers(balances)

    @jax.named_scope("backward_layers")
    def backward(
        self,
        weights: Sequence[LayerWeights],
        residuals: Sequence[Any],
        cotangents: Cotangents,
        context: Any,
        sink: GradientSink,
        sums: Any,
        *,
        bucket_layers: int = 1,
    ) -> Backward:
        """Run all layers backwards.

        Args:
            weights: the weights of each span, prefetched for its last layer.
            residuals: the residuals of each span.
            cotangents: the cotangents of the forward's results.
            context: as in the forward.
            sink: takes the gradient of every layer.
            sums: the sink's, so far.
            bucket_layers: layers whose gradients `sink` takes together; divides the number of all.
        """
        x_cotangent, balance_cotangent = cotangents
        starts = self._firsts

        def of_layer(
            span: int, is_alone: bool, carry: Any, index: jax.Array
        ) -> tuple[Any, Parameters]:
            x_cotangent, prefetched = carry
            own, prefetched = weights[span].source.take(
                prefetched, index, jnp.maximum(index - 1, 0)
            )
            number = self.first_layer + starts[span] + index
            kept = self.store.get(residuals[span], index)
            if self.is_unrolled:
                # XLA would keep what later layers leave for their weights, or compute this one
                # again while others still go forwards.
                kept, x_cotangent = barrier((kept, x_cotangent))
            if is_alone:
                # XLA unrolls a loop of one iteration, and could compute its layer again while
                # others still go forwards. XLA for CPUs drops the barrier.
                kept = after(kept, x_cotangent)
            gradient, made = kept.backward(
                (x_cotangent, balance_cotangent), again=(own, number, context)
            )
            if self.is_unrolled:
                made, gradient = barrier((made, gradient))
            return (typed_like(made, x_cotangent), prefetched), gradient

        def iteration(
            span_lengths: Sequence[tuple[int, int]],
            is_loop: bool,
            carry: tuple[Any, Any],
            indices: jax.Array,
        ) -> tuple[Any, None]:
            is_loop &= len(span_lengths) == 1
            (x_cotangent, prefetched), sums = carry
            prefetched = list(prefetched)
            gradients: list[Parameters] = []
            end = bucket_layers
            for span, length in reversed(span_lengths):
                own = indices[end - length : end] - starts[span]
                (x_cotangent, prefetched[span]), made = stacking_scan(
                    functools.partial(of_layer, span, length == 1 and not is_loop),
                    (x_cotangent, prefetched[span]),
                    own,
                    reverse=True,
                )
                gradients.insert(0, made)
                end -= length
            bucket = jax.tree.map(_concatenate, *gradients)
            return ((x_cotangent, prefetched), sink.put(sums, indices[0], bucket)), None

        carry: Any = ((x_cotangent, [own.prefetched for own in weights]), sums)
        count = self.spans[0].count
        if isinstance(count, int):
            carry = self._over_buckets(iteration, carry, bucket_layers, sink.warmup_iterations)
        else:
            assert len(self.spans) == bucket_layers == 1, (
                "a traced number of layers is that of one span"
            )
            carry = lax.fori_loop(
                jnp.int32(0),
                count,
                lambda done, carry: iteration([(0, 1)], True, carry, (count - 1 - done)[None])[0],
                carry,
            )
        (x, prefetched), sums = carry
        return Backward(x, sums, prefetched)

    @jax.named_scope("backward_layers")
    def input_gradients(
        self,
        weights: Sequence[LayerWeights],
        residuals: Sequence[Any],
        cotangents: Cotangents,
        context: Any,
    ) -> tuple[jax.Array, list[Any]]:
        """Run the first half of a split backward; arguments are those of `backward`.

        Returns:
            The cotangent of the stream before the first layer; and the stash of each span.
        """
        x, balance_cotangent = cotangents

        def body(
            own: LayerWeights, residuals: Any, first: int, carry: Any, index: jax.Array
        ) -> Any:
            x, prefetched, stored = carry
            weights, prefetched = own.source.take(prefetched, index, jnp.maximum(index - 1, 0))
            again = (weights, self.first_layer + first + index, context)
            stored, residuals = self.stash_store.begin(stored, index, residuals)
            arguments = (self.store.get(residuals, index), again, (x, balance_cotangent))
            made, stashed = (self.split or SplitBackward.of(*arguments)).input_gradient(*arguments)
            stored, stacked = self.stash_store.put(stored, index, stashed)
            return (typed_like(made, x), prefetched, stored), stacked

        stashed: list[Any] = []
        by_span = zip(self.spans, weights, residuals, self._firsts, strict=True)
        for span, own, of_span, first in reversed(list(by_span)):
            loop = functools.partial(body, own, of_span, first)
            carry = (x, own.prefetched, self.stash_store.start())
            (x, _, stored), stacked = _loop(loop, carry, span.count, reverse=True)
            stashed.insert(0, self.stash_store.finish(stored, stacked))
        return x, stashed

    @jax.named_scope("backward_layers")
    def weight_gradients(
        self,
        weights: Sequence[LayerWeights],
        residuals: Sequence[Any],
        stashed: Sequence[Any],
        context: Any,
        sink: GradientSink,
        sums: Any,
    ) -> Any:
        """Run the second half of a split backward, and return the sink's sums.

        `stashed` is that of each span from `input_gradients`; the other arguments are those of
        `backward`, but that the weights are prefetched for the first layer.
        """

        def body(number: int, first: int, carry: Any, index: jax.Array) -> Any:
            prefetched, sums = carry
            span, own = self.spans[number], weights[number]
            following = jnp.minimum(index + 1, span.count - 1)
            layer_weights, prefetched = own.source.take(prefetched, index, following)
            again = (layer_weights, self.first_layer + first + index, context)
            of_layer = self.stash_store.get(stashed[number], index)
            gradient = of_layer.weight_gradients(self.store.get(residuals[number], index), again)
            stacked = jax.tree.map(lambda leaf: leaf[None], gradient)
            return (prefetched, sink.put(sums, first + index, stacked)), None

        for number, first in enumerate(self._firsts):
            loop = functools.partial(body, number, first)
            carry = (weights[number].prefetched, sums)
            (_, sums), _ = _loop(loop, carry, self.spans[number].count)
        return sums

    def _over_buckets(
        self,
        iteration: Callable[..., tuple[Any, None]],
        carry: Any,
        bucket_layers: int,
        warmup_iterations: int,
    ) -> Any:
        """Run an iteration over each bucket, the last one first.

        An iteration is told whether it is the body of a loop, which XLA does not unroll.

        The first iterations, in which the structure of the sink's sums may change, are in no loop;
        then comes a loop over all buckets that lie alike in the spans, and so on.
        """
        starts = self._firsts
        ends = [*starts[1:], starts[-1] + int(self.spans[-1].count)]
        buckets = np.arange(ends[-1], dtype=np.int32).reshape(-1, bucket_layers)
        in_loops = max(len(buckets) - warmup_iterations, 0)
        for number in reversed(range(in_loops, len(buckets))):
            span_lengths = _span_lengths(buckets[number], starts, ends)
            carry, _ = iteration(span_lengths, False, carry, jnp.asarray(buckets[number]))
        loops = itertools.groupby(
            buckets[:in_loops], key=lambda bucket: _span_lengths(bucket, starts, ends)
        )
        for span_lengths, alike in reversed([(lengths, list(group)) for lengths, group in loops]):
            of_bucket = functools.partial(iteration, span_lengths, len(alike) > 1)
            carry, _ = stacking_scan(of_bucket, carry, jnp.asarray(np.stack(alike)), reverse=True)
        return carry

    @property
    def _firsts(self) -> list[int]:
        """The position of each span's first layer."""
        if len(self.spans) == 1:
            return [0]
        counts = [int(span.count) for span in self.spans]
        return [sum(counts[:number]) for number in range(len(counts))]


def forward_layer(
    layer: Layer, x: jax.Array, again: tuple[Parameters, jax.Array, Any]
) -> tuple[tuple[jax.Array, jax.Array | None], Residuals]:
    """Run one layer on the stream `x`: its results, and the residuals for its backward.

    `again` are its weights, its number and the context, which the backward is given once more; it
    then returns the gradients of the trained weights in the compute dtype, of quantized ones too.
    """
    split = split_trained(again[0])
    return forward(
        lambda own, x: layer(split.merge(own), x, *again[1:]),
        split.trained,
        x,
        again=again,
    )


def _span_lengths(
    indices: np.ndarray, starts: Sequence[int], ends: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the spans that consecutive layers belong to, and how many of them to each."""
    first, last = indices[0], indices[-1]
    overlaps = (
        min(end, last + 1) - max(start, first) for start, end in zip(starts, ends, strict=True)
    )
    return tuple((span, int(count)) for span, count in enumerate(overlaps) if count > 0)


def _concatenate(*stacks: jax.Array) -> jax.Array:
    return stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)


def _sum_over_layers(balances: Sequence[jax.Array | None]) -> jax.Array | None:
    """Sum the balance losses [L, B] of some spans."""
    sums = [each.sum(axis=0) for each in balances if each is not None]
    return functools.reduce(jnp.add, sums) if sums else None


def _loop(
    body: Callable[..., tuple[Any, Any]],
    carry: Any,
    count: int | jax.Array,
    *,
    reverse: bool = False,
    scanned: Any = None,
) -> tuple[Any, Any]:
    """Run `body(carry, index)` for each layer of a span; return the carry and what it stacks.

    With `scanned`, a tree of stacked layers, `body` also gets each layer's slice. A loop of a
    traced number of layers stacks nothing: `body` then has a None in each place.
    """
    if isinstance(count, int):
        indices = jnp.arange(count, dtype=jnp.int32)
        xs = (indices,) if scanned is None else (indices, scanned)
        scan = stacking_scan if scanned is None else lax.scan
        return scan(lambda carry, each: body(carry, *each), carry, xs, reverse=reverse)
    stacked: list[Any] = []

    def step(done: jax.Array, carry: Any) -> Any:
        carry, made = body(carry, count - 1 - done if reverse else done)
        assert not jax.tree.leaves(made), "a loop of a traced number of layers stacks nothing"
        stacked.append(made)
        return carry

    carry = lax.fori_loop(jnp.int32(0), count, step, carry)
    return carry, stacked[0]


def stacking_scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, *, reverse: bool = False
) -> tuple[Any, Any]:
    """Run `lax.scan(body, carry, xs)`, with unwritten arrays for its results that wait for `carry`.

    `lax.scan` stacks results into zeros, which XLA for GPUs writes, and makes as early as it can:
    the residuals of a step's last microbatch would be held from the step's beginning on. Not
    differentiable.
    """
    count = len(jax.tree.leaves(xs)[0])
    if count == 1:
        carry, made = body(carry, layer_slice(xs, 0))
        return carry, jax.tree.map(lambda leaf: leaf[None], made)
    traced_once = jax.jit(body, inline=True)
    shapes = jax.eval_shape(lambda: traced_once(carry, layer_slice(xs, 0))[1])
    if not jax.tree.leaves(shapes):
        return lax.scan(traced_once, carry, xs, reverse=reverse)

    def iteration(state: tuple[Any, Any], each: tuple[jax.Array, Any]) -> Any:
        carry, stacks = state
        index, x = each
        carry, made = traced_once(carry, x)

        def write(stack: jax.Array, leaf: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(
                stack, leaf, index, 0, allow_negative_indices=False
            )

        return (carry, jax.tree.map(write, stacks, made)), None

    carry, zero = zero_after(carry)
    indices = jnp.arange(count, dtype=jnp.int32)
    start = (carry, unwritten(shapes, count, zero=zero))
    done: tuple[Any, Any]
    done, _ = lax.scan(iteration, start, (indices, xs), reverse=reverse)
    return done
