"""What a mixture sends, by formula: to plan with, and to compare with what a program holds.

With N tokens that a rank sends (its share of the stream's), R ranks of `expert`, t of `tensor`,
windows of W places (see `geojax.models.moe.dispatch`), hidden width d, numbers of n bytes, and
w bytes (at least 4) for gates, one layer sends in forward and backward together

    over expert     (R - 1) W (4 d n + 2 w + 4)      rows there and back, twice; gates there and
                                                     back; each row's expert there
    over tensor     (t - 1) R W (4 d n + 2 w + 4)    the windows gathered and scattered where they
                                                     arrive

and less than 100 bytes an expert and row for the balance loss and, with capacity, for who is
dropped. What some pair of ranks has beyond W is exchanged further, and is not counted here: it
depends on the tokens. Each token goes to k experts, W is 1.25 k N / R: an all-gather of the tokens
over `expert` and a reduce-scatter of the results would send 4 (R - 1) N d n instead, whatever k.

With one rank of `expert` nothing travels, and the stream is entered and left as in a dense block.
"""

import collections
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from geojax.hlo.conventions import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    reduce_scatter_bytes,
)
from geojax.models.chunk.remat import Remat
from geojax.models.config import ModelConfig
from geojax.models.moe.dispatch import most_to_a_rank, windows
from geojax.models.moe.sharded_sequence import row_axes, row_length
from geojax.models.parallel.parallelism import Parallelism
from geojax.runtime.platform import target_platform

Axes = tuple[str, ...]
Sent = dict[Axes, Fraction]
"""Bytes that a device sends by the axes, longer than 1, of the collectives."""


def expected_mixture_bytes(
    config: ModelConfig,
    parallelism: Parallelism,
    *,
    rows: int,
    columns: int,
    dtype: Any,
    remat: Remat = "none",
    platform: str | None = None,
) -> Sent:
    """What one device sends in forward and backward of the mixture of one layer.

    Args:
        config: a model with a mixture.
        parallelism: how it is spread.
        rows: of the microbatch on a device.
        columns: of a row, on a device (1 / context of them).
        dtype: that the model computes in.
        remat: what the forward pass keeps.
        platform: what the program is compiled for; None: what `target_platform` says.
    """
    platform = platform or target_platform()
    ranks = parallelism.tensor
    stream = columns // ranks if parallelism.sequence else columns
    sent: Sent = collections.defaultdict(Fraction)
    sent.update(_counts(config, parallelism, rows, stream, dtype, remat))
    if parallelism.expert > 1:
        tokens = _travel(config, parallelism, rows, stream, dtype, remat, platform)
    else:
        tokens = _choices(config, parallelism, rows * columns, dtype, remat)
    for axes, count in tokens.items():
        sent[axes] += count
    if ranks > 1 and (parallelism.expert == 1 or config.n_shared_experts):
        again = 1 if parallelism.sequence and remat != "none" else 0
        half = reduce_scatter_bytes(rows * columns * config.hidden_size * _size(dtype), ranks)
        sent["tensor",] += (4 + again) * half
    return {axes: count for axes, count in sent.items() if count}


def _travel(
    config: ModelConfig,
    parallelism: Parallelism,
    rows: int,
    stream: int,
    dtype: Any,
    remat: Remat,
    platform: str,
) -> Sent:
    """The first exchange, and the largest number of tokens that wait for further ones."""
    ranks, experts = parallelism.tensor, parallelism.expert
    share = rows * stream if parallelism.sequence else -(-rows * stream // ranks)
    most = most_to_a_rank(share, rows, row_length(stream, parallelism), config, parallelism)
    sizes = windows(share, most, config, parallelism, platform)
    row, gate = config.hidden_size * _size(dtype), _wide(dtype)
    there, back = row + gate + 4, row
    place = there + back + (row + gate) + row  # forwards, and backwards without experts' numbers
    if remat == "full":
        place += there
    window = experts * sizes.first
    sent: Sent = collections.defaultdict(Fraction)
    sent["expert",] = all_to_all_bytes(window * place, experts)
    if ranks > 1:
        sent["tensor",] = all_gather_bytes(window * place, ranks)
    if ranks > 1 and not parallelism.sequence:
        sent["tensor",] += all_gather_bytes(share * row, ranks)
        of_token = row + config.num_experts_per_tok * gate
        sent["tensor",] += all_reduce_bytes(rows * stream * of_token, ranks)
    if sizes.exchanges:
        passes = 2 if remat == "full" else 1
        axes = ("expert", "tensor") if ranks > 1 else ("expert",)
        sent[axes] += passes * all_reduce_bytes(4, experts * ranks)
    return sent


def _choices(
    config: ModelConfig, parallelism: Parallelism, tokens: int, dtype: Any, remat: Remat
) -> Sent:
    """The router's choices, entered with the stream where no token travels."""
    ranks, choices = parallelism.tensor, tokens * config.num_experts_per_tok
    if ranks == 1:
        return {}
    gates = choices * _wide(dtype)
    if not parallelism.sequence:
        return {("tensor",): all_reduce_bytes(gates, ranks)}
    entered = reduce_scatter_bytes(gates + 4 * choices, ranks)
    passes = 1 if remat == "none" else 2
    left = reduce_scatter_bytes(gates, ranks)
    return {("tensor",): passes * entered + left}


def _counts(
    config: ModelConfig, parallelism: Parallelism, rows: int, stream: int, dtype: Any, remat: Remat
) -> Sent:
    """What the ranks that share rows tell each other of their columns."""
    axes = row_axes(parallelism)
    sizes = {axis: getattr(parallelism, axis) for axis in axes}
    passes = 2 if remat == "full" else 1
    sent: Sent = collections.defaultdict(Fraction)
    if not axes:
        return sent
    experts = config.num_experts
    sums = rows * (2 * experts + 1) * _wide(dtype)
    sent[axes] += passes * all_reduce_bytes(sums, row_length(1, parallelism))
    if config.capacity_factor is not None:
        runs = 2 if stream % 2 == 0 else 1
        held = 4 * runs * rows * experts
        for axis in reversed(axes):
            sent[axis,] += passes * all_gather_bytes(held, sizes[axis])
            held *= sizes[axis]
    return sent


def _size(dtype: Any) -> int:
    return jnp.dtype(dtype).itemsize


def _wide(dtype: Any) -> int:
    return jnp.promote_types(dtype, jnp.float32).itemsize
