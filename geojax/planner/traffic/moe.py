"""Predicted bytes of a mixture of experts.

With N tokens that a rank dispatches (its share of the sequences), R ranks of `expert`, t of
`tensor`, windows of W tokens (see `geojax.models.moe.dispatch`), hidden size H, numbers of n bytes,
and w bytes (at least 4) for gates, one layer sends in forward and backward together

    over expert     (R - 1) W (4 H n + 2 w + 4)      tokens there and back, twice; gates there and
                                                     back; each token's expert there
    over tensor     (t - 1) R W (4 H n + 2 w + 4)    the windows gathered and scattered where they
                                                     arrive

and less than 100 bytes an expert and sequence for the aux loss and, with capacity, for the choice
of dropped tokens. Each token goes to k experts, W is 1.25 k N / R: an all-gather of the tokens over
`expert` and a reduce-scatter of the results would send 4 (R - 1) N H n instead, whatever k.

Tokens of a pair of ranks beyond W are exchanged further, in windows of W / 4. How many depends on
the data; the program has as many as there can be, and each would send

    over expert     (R - 1) W / 4 (5 H n + 3 w + 8)  tokens and gates there once more, to repeat it
                                                     for the backward pass

With one rank of `expert` no token travels, and tensor parallelism is that of a dense block.

The second half of a split backward gathers again over `tensor` what it needs of the dense blocks
(`geojax.planner.traffic.tensor`), and with remat full the windows where they arrive.
"""

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
from geojax.models.moe.sharded_sequence import full_sequence_length, sequence_axes
from geojax.models.parallel.parallelism import Parallelism
from geojax.planner.traffic.by_axes import Axes, BytesByAxes, add, no_bytes
from geojax.runtime.platform import Platform, target_platform


def predicted_moe_bytes(
    config: ModelConfig,
    parallelism: Parallelism,
    *,
    sequences: int,
    positions: int,
    dtype: Any,
    remat: Remat = "none",
    platform: Platform | None = None,
    split_backward: bool = False,
    further_exchanges: bool = False,
) -> dict[Axes, Fraction]:
    """Predict the bytes of forward and backward of the experts of one layer.

    Args:
        config: a model with experts.
        parallelism: how the mesh splits it.
        sequences: sequences of the microbatch on a device.
        positions: positions of a sequence on a device (1 / context of them).
        dtype: the compute dtype.
        remat: the rematerialization policy.
        platform: the platform of the program; None, that of `target_platform`.
        split_backward: True where the gradients of weights come in a second half.
        further_exchanges: count all that the most uneven tokens could need; otherwise none.
    """
    assert config.is_moe, "the model must have experts"
    platform = platform or target_platform()
    ranks = parallelism.tensor
    own_positions = positions // ranks if parallelism.sequence else positions
    sent = _counts(config, parallelism, sequences, own_positions, dtype, remat)
    if parallelism.expert > 1:
        tokens = _dispatch(
            config,
            parallelism,
            sequences,
            own_positions,
            dtype,
            remat,
            platform,
            gathers_again=split_backward and remat == "full",
            further_exchanges=further_exchanges,
        )
    else:
        tokens = _choices(config, parallelism, sequences * positions, dtype, remat)
    add(sent, tokens)
    if ranks > 1 and (parallelism.expert == 1 or config.n_shared_experts):
        again = 1 if parallelism.sequence and remat != "none" else 0
        if split_backward and parallelism.sequence:  # cotangents of shared experts; inputs
            again += (1 if config.n_shared_experts else 0) + (1 if remat == "full" else 0)
        half = reduce_scatter_bytes(
            sequences * positions * config.hidden_size * _size(dtype), ranks
        )
        sent["tensor",] += (4 + again) * half
    return {axes: count for axes, count in sent.items() if count}


def _dispatch(
    config: ModelConfig,
    parallelism: Parallelism,
    sequences: int,
    own_positions: int,
    dtype: Any,
    remat: Remat,
    platform: Platform,
    *,
    gathers_again: bool,
    further_exchanges: bool,
) -> BytesByAxes:
    """Predict the exchanges, and the agreement on how many further ones there are."""
    ranks, experts = parallelism.tensor, parallelism.expert
    tokens = sequences * own_positions
    share = tokens if parallelism.sequence else -(-tokens // ranks)
    length = full_sequence_length(own_positions, parallelism)
    most = most_to_a_rank(share, sequences, length, config, parallelism)
    sizes = windows(share, most, config, parallelism, platform)
    token, gate = config.hidden_size * _size(dtype), _wide(dtype)
    there, back = token + gate + 4, token
    # Forwards, and backwards without the experts' numbers.
    dispatched = there + back + (token + gate) + token
    repeated = dispatched + there
    window = experts * sizes.first
    sent = no_bytes()
    of_window = window * (repeated if remat == "full" else dispatched)
    of_further = 0
    if further_exchanges:  # they keep nothing, whatever the policy
        of_further = sizes.exchanges * experts * sizes.further * repeated
    sent["expert",] = all_to_all_bytes(of_window + of_further, experts)
    if ranks > 1:
        again = window * token if gathers_again else 0
        sent["tensor",] = all_gather_bytes(of_window + again + of_further, ranks)
    if ranks > 1 and not parallelism.sequence:
        sent["tensor",] += all_gather_bytes(share * token, ranks)
        with_choices = token + config.num_experts_per_tok * gate
        sent["tensor",] += all_reduce_bytes(tokens * with_choices, ranks)
    if sizes.exchanges:
        passes = 2 if remat == "full" else 1
        axes = ("expert", "tensor") if ranks > 1 else ("expert",)
        sent[axes] += passes * all_reduce_bytes(4, experts * ranks)
    return sent


def _choices(
    config: ModelConfig, parallelism: Parallelism, tokens: int, dtype: Any, remat: Remat
) -> BytesByAxes:
    """Predict the bytes of the router's choices where no token travels."""
    ranks, choices = parallelism.tensor, tokens * config.num_experts_per_tok
    sent = no_bytes()
    if ranks == 1:
        return sent
    gates = choices * _wide(dtype)
    if not parallelism.sequence:
        sent["tensor",] = all_reduce_bytes(gates, ranks)
        return sent
    entered = reduce_scatter_bytes(gates + 4 * choices, ranks)
    passes = 1 if remat == "none" else 2
    left = reduce_scatter_bytes(gates, ranks)
    sent["tensor",] = passes * entered + left
    return sent


def _counts(
    config: ModelConfig,
    parallelism: Parallelism,
    sequences: int,
    own_positions: int,
    dtype: Any,
    remat: Remat,
) -> BytesByAxes:
    """Predict the bytes of the statistics that ranks exchange that share sequences."""
    axes = sequence_axes(parallelism)
    sizes = {axis: getattr(parallelism, axis) for axis in axes}
    passes = 2 if remat == "full" else 1
    sent = no_bytes()
    if not axes:
        return sent
    experts = config.num_experts
    numbers = 2 * experts + (2 if config.router_z_loss_coef else 1)
    sums = sequences * numbers * _wide(dtype)
    sent[axes] += passes * all_reduce_bytes(sums, full_sequence_length(1, parallelism))
    if config.capacity_factor is not None:
        runs = 2 if own_positions % 2 == 0 else 1
        count_bytes = 4 * runs * sequences * experts
        for axis in reversed(axes):
            sent[axis,] += passes * all_gather_bytes(count_bytes, sizes[axis])
            count_bytes *= sizes[axis]
    return sent


def _size(dtype: Any) -> int:
    return jnp.dtype(dtype).itemsize


def _wide(dtype: Any) -> int:
    return jnp.promote_types(dtype, jnp.float32).itemsize
