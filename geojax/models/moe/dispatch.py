"""Expert parallelism: dispatch of tokens to the ranks of their experts, and combination.

A token goes to every expert that it chose (a rank that holds two of them gets it twice), by
`all_to_all` inside the site. Shapes are static and the router's choices are not, so a message has a
window of W slots for each pair of ranks, a quarter more than it needs when all experts are equally
busy. If some pair of ranks has more for each other, all ranks exchange further windows, a quarter
as large, until nothing is left: no token is dropped here, an imbalance costs time and not memory.

    N tokens a rank, k experts a token, R ranks    W = ceil(1.25 k N / R), or the most there can be
    buffers                                        R W slots of a token's width: 1.25 k N
    one buffer for the worst case would have       R N min(k, experts of a rank) slots

The loop of further exchanges is a branch of the program. On a platform whose branches cannot hold
collectives (CPUs; see `geojax.runtime.platform`) W is the most there can be, and no branch is
needed.

The further exchanges keep nothing for the backward pass, which repeats them. With tensor
parallelism each of its ranks sends its share of the tokens (with sequence parallelism those of its
stream), so that nothing crosses `expert` twice, and the windows are gathered over `tensor` where
they arrive.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.collectives.axes import vary_over, varying_axes
from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters
from geojax.models.moe.capacity import expert_capacity
from geojax.models.moe.experts import RoutedTokens, apply_experts
from geojax.models.moe.grouped_matmul import count_each
from geojax.models.moe.permute import TokenPermutation, permute, unpermute
from geojax.models.parallel.parallelism import Parallelism
from geojax.precision import LinearMatmul, accumulate, merge_quantized, split_quantized
from geojax.runtime.platform import Platform, target_platform

RECEIVED = "expert_received"
SLOTS = "expert_slots"
"""Names of received tokens and of their slots, for remat policies."""

Total = TypeVar("Total")

_SLACK = 1.25
_FURTHER = 0.25


class ExchangeWindows(NamedTuple):
    """Static sizes of the exchanges."""

    first: int
    """Slots of a window of the first exchange (W)."""
    further: int
    """Slots of a window of any further exchange."""
    exchanges: int
    """Most further exchanges that can be needed."""


def windows(
    tokens: int, most: int, config: ModelConfig, parallelism: Parallelism, platform: Platform
) -> ExchangeWindows:
    """Compute the sizes for a rank that sends `tokens` tokens.

    Args:
        tokens: tokens of the rank (N).
        most: most tokens that can go to one rank, each counted for every expert that it has there.
        config: the model.
        parallelism: how it is sharded.
        platform: platform that the program is compiled for.
    """
    even = tokens * config.num_experts_per_tok / parallelism.expert
    first = min(math.ceil(_SLACK * even), most) if platform.branches_hold_collectives else most
    first = max(first, 1)
    further = math.ceil(_FURTHER * first)
    return ExchangeWindows(first, further, max(-(-(most - first) // further), 0))


def most_to_a_rank(
    tokens: int, sequences: int, sequence: int, config: ModelConfig, parallelism: Parallelism
) -> int:
    """Return the most choices that can go to one rank, of `tokens` tokens of `sequences`."""
    local_experts = config.num_experts // parallelism.expert
    limit = sequences * local_experts * expert_capacity(sequence, config)
    return min(tokens * min(config.num_experts_per_tok, local_experts), limit)


class _Plan(NamedTuple):
    """Destination of each choice of a token: A = N k choices, R ranks."""

    queue: jax.Array
    """int32 [A], the choice's number among those that go to the same rank."""
    rank: jax.Array
    """int32 [A], the rank; R for none."""
    local: jax.Array
    """int32 [A], the expert's number on that rank."""
    needed: jax.Array
    """int32 [], further exchanges that are needed, the same on all ranks."""


def dispatch_and_combine(
    parameters: Parameters,
    tokens: RoutedTokens,
    most: int,
    config: ModelConfig,
    parallelism: Parallelism,
    matmul: LinearMatmul,
) -> jax.Array:
    """Sum the outputs of each token's experts, weighted by their gates, on any ranks.

    Args:
        parameters: this rank's part of the experts: E / expert of them, 1 / tensor of their width.
        tokens: this rank's (those of another rank of `tensor` are others); `experts` counts all E.
        most: most of the N k choices that can fall on one rank's experts.
        config: the model.
        parallelism: how the model is sharded, `expert` > 1.
        matmul: matmul of the experts.

    Returns:
        [N, H] in at least float32.
    """
    sizes = windows(tokens.x.shape[0], most, config, parallelism, target_platform())
    axes = varying_axes(parameters, tokens)
    parameters, (x, experts, gates) = vary_over((parameters, tokens), axes)
    quantized_kernels, trained = split_quantized(parameters)
    fixed = _Fixed(quantized_kernels, _plan(experts, sizes, config, parallelism), matmul)
    return _exchanges(config, parallelism, sizes, trained, x, gates, fixed)


class _Fixed(NamedTuple):
    """Inputs of an exchange without gradients."""

    quantized_kernels: Any
    """Kernels that are quantized already, None in the place of others."""
    plan: _Plan
    matmul: LinearMatmul


def _plan(
    experts: jax.Array, sizes: ExchangeWindows, config: ModelConfig, parallelism: Parallelism
) -> _Plan:
    local_experts = config.num_experts // parallelism.expert
    flat = experts.reshape(-1)
    rank = flat // local_experts  # none is rank R
    order = jnp.argsort(rank, stable=True).astype(jnp.int32)
    counts = count_each(rank, parallelism.expert)
    starts = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))  # in the order
    queue = jnp.arange(flat.shape[0], dtype=jnp.int32) - starts[rank[order]]
    queue = jnp.zeros_like(queue).at[order].set(queue, unique_indices=True)
    remaining = jnp.maximum(jnp.max(counts) - sizes.first, 0)
    if sizes.exchanges:
        sharing = ("expert", "tensor") if parallelism.tensor > 1 else ("expert",)
        remaining = lax.pmax(remaining, sharing)
    plan = _Plan(queue, rank, flat % local_experts, -(-remaining // sizes.further))
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, SLOTS), plan)


def _exchange(
    config: ModelConfig,
    parallelism: Parallelism,
    fixed: _Fixed,
    start: jax.Array | int,
    window_size: int,
    trained: Parameters,
    x: jax.Array,
    gates: jax.Array,
) -> jax.Array:
    """Run the choices number `start` to `start + window_size` of each queue.

    Returns their contributions to each token, [N, H] in at least float32.
    """
    parameters, plan = merge_quantized(fixed.quantized_kernels, trained), fixed.plan
    tokens, choices = gates.shape
    total = parallelism.expert * window_size
    window = plan.queue - start
    inside = (window >= 0) & (window < window_size) & (plan.rank < parallelism.expert)
    slot = jnp.where(inside, plan.rank * window_size + window, total)
    no_choice = vary_over(jnp.full(total, tokens * choices, jnp.int32), varying_axes(slot))
    numbers = jnp.arange(tokens * choices, dtype=jnp.int32)
    choice_at = no_choice.at[slot].set(numbers, mode="drop", unique_indices=True)
    of_choice = TokenPermutation(slot[:, None], choice_at)
    of_token = TokenPermutation(slot.reshape(tokens, choices), choice_at // choices)
    local_experts = parameters["down"]["kernel"].shape[0]
    local = plan.local.at[choice_at].get(mode="fill", fill_value=local_experts)
    send = functools.partial(_to_experts, parallelism=parallelism)
    received = RoutedTokens(
        send(permute(x, of_token)),
        send(local)[:, None],
        send(permute(gates.reshape(-1, 1), of_choice)),
    )
    out = apply_experts(parameters, received, config, parallelism, fixed.matmul)
    return unpermute(_to_tokens(out.astype(x.dtype), parallelism), of_token)


def _to_experts(windows: jax.Array, parallelism: Parallelism) -> jax.Array:
    """Send [R W, ...] to the ranks of the experts; returns [tensor R W, ...] from all ranks."""
    windows = lax.all_to_all(windows, "expert", split_axis=0, concat_axis=0, tiled=True)
    if parallelism.tensor > 1:
        windows = lax.all_gather(windows, "tensor", axis=0, tiled=True)
    return checkpoint_name(windows, RECEIVED)


def _to_tokens(windows: jax.Array, parallelism: Parallelism) -> jax.Array:
    """Send results back to the tokens' ranks, summed over the parts of the experts' width."""
    if parallelism.tensor > 1:
        windows = lax.psum_scatter(windows, "tensor", scatter_dimension=0, tiled=True)
    return lax.all_to_all(windows, "expert", split_axis=0, concat_axis=0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchanges(
    config: ModelConfig,
    parallelism: Parallelism,
    sizes: ExchangeWindows,
    trained: Parameters,
    x: jax.Array,
    gates: jax.Array,
    fixed: _Fixed,
) -> jax.Array:
    """Run all exchanges, one after the other: [N, H] in at least float32."""
    return _forward(config, parallelism, sizes, trained, x, gates, fixed)[0]


_Inputs = tuple[Parameters, jax.Array, jax.Array]
_Residuals = tuple[Callable[[jax.Array], _Inputs], _Inputs, _Fixed]


def _forward(
    config: ModelConfig,
    parallelism: Parallelism,
    sizes: ExchangeWindows,
    trained: Parameters,
    x: jax.Array,
    gates: jax.Array,
    fixed: _Fixed,
) -> tuple[jax.Array, _Residuals]:
    exchange = functools.partial(_exchange, config, parallelism, fixed)
    inputs = (trained, x, gates)
    first, backward = jax.vjp(functools.partial(exchange, 0, sizes.first), *inputs)

    def add(total: jax.Array, start: jax.Array) -> jax.Array:
        return total + exchange(start, sizes.further, *inputs)

    return _repeat(add, first, fixed.plan.needed, sizes), (backward, inputs, fixed)


def _backward(
    config: ModelConfig,
    parallelism: Parallelism,
    sizes: ExchangeWindows,
    residuals: _Residuals,
    cotangent: jax.Array,
) -> tuple[Parameters, jax.Array, jax.Array, None]:
    backward, inputs, fixed = residuals
    exchange = functools.partial(_exchange, config, parallelism, fixed)

    def add(sums: _Inputs, start: jax.Array) -> _Inputs:
        _, backward = jax.vjp(functools.partial(exchange, start, sizes.further), *inputs)
        return accumulate(sums, backward(cotangent))

    sums = _repeat(add, backward(cotangent), fixed.plan.needed, sizes)
    return *sums, None


_exchanges.defvjp(_forward, _backward)


def _repeat(
    add: Callable[[Total, jax.Array], Total],
    total: Total,
    needed: jax.Array,
    sizes: ExchangeWindows,
) -> Total:
    """Add the first `needed` of the further exchanges to `total`, in at least float32.

    It is a loop of known length whose iterations may do nothing: the program shows the most bytes
    that it can send.
    """
    if sizes.exchanges == 0:
        return total

    def exchange_if_needed(total: Total, number: jax.Array) -> tuple[Total, None]:
        start = sizes.first + number * sizes.further
        return lax.cond(number < needed, lambda: add(total, start), lambda: total), None

    def further_exchanges() -> Total:
        wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), total)
        sums, _ = lax.scan(exchange_if_needed, wide, jnp.arange(sizes.exchanges, dtype=jnp.int32))
        return jax.tree.map(lambda s, x: s.astype(x.dtype), sums, total)

    return lax.cond(needed > 0, further_exchanges, lambda: total)
