"""Predicted bytes of a mixture of experts over `expert`.

With R ranks of `expert`, windows of W tokens (see `geojax.models.moe.dispatch`), hidden size H,
numbers of n bytes, and w bytes (at least 4) for gates, one layer sends in forward and backward
together

    over expert     (R - 1) W (4 H n + 2 w + 4)      tokens there and back, twice; gates there and
                                                     back; each token's expert there

and with remat full tokens, gates and experts there once more. Each token goes to k experts, and W
is 1.25 k N / R of N tokens that a rank dispatches: an all-gather of the tokens and a reduce-scatter
of the results would send 4 (R - 1) N H n instead, whatever k.

Tokens of a pair of ranks beyond W are exchanged further, as the data want it; those bytes are not
counted here. With one rank of `expert` no token travels.
"""

from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from geojax.hlo.conventions import all_to_all_bytes
from geojax.models import ModelConfig
from geojax.models.chunk.remat import Remat
from geojax.models.moe.dispatch import most_to_a_rank, windows
from geojax.models.moe.sharded_sequence import full_sequence_length
from geojax.models.parallel.parallelism import Parallelism
from geojax.runtime.platform import Platform


def predicted_expert_bytes(
    config: ModelConfig,
    parallelism: Parallelism,
    *,
    sequences: int,
    positions: int,
    dtype: Any,
    remat: Remat,
    platform: Platform,
) -> Fraction:
    """Predict the bytes over `expert` of forward and backward of one layer.

    Args:
        config: a model with experts.
        parallelism: how the mesh splits it.
        sequences: sequences of the microbatch on a device.
        positions: positions of a sequence on a device (1 / context of them).
        dtype: the compute dtype.
        remat: the rematerialization policy.
        platform: the platform of the program.
    """
    assert config.is_moe, "the model must have experts"
    ranks, experts = parallelism.tensor, parallelism.expert
    own_positions = positions // ranks if parallelism.sequence else positions
    tokens = sequences * own_positions
    share = tokens if parallelism.sequence else -(-tokens // ranks)
    length = full_sequence_length(own_positions, parallelism)
    most = most_to_a_rank(share, sequences, length, config, parallelism)
    window = experts * windows(share, most, config, parallelism, platform).first
    token = config.hidden_size * jnp.dtype(dtype).itemsize
    gate = jnp.promote_types(dtype, jnp.float32).itemsize
    there, back = token + gate + 4, token
    # Forwards, and backwards without the experts' numbers.
    slot = there + back + (token + gate) + token
    if remat == "full":
        slot += there
    return all_to_all_bytes(window * slot, experts)
