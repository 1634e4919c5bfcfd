"""Capacity of experts: the tokens of each sequence that they drop, the same on any layout.

Shapes: B batch, S sequence, E experts, k experts of a token.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.models.config import ModelConfig
from geojax.models.moe.sharded_sequence import full_sequence_length, sequence_axes
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.sequence_order import position_order


def expert_capacity(sequence: int, config: ModelConfig) -> int:
    """Return the most tokens that an expert takes of a sequence of `sequence` tokens.

    It is ceil(capacity_factor * sequence * k / E), an even share of the tokens, padding included,
    times the factor; without a factor the whole sequence.
    """
    if config.capacity_factor is None:
        return sequence
    even = Fraction(sequence * config.num_experts_per_tok, config.num_experts)
    factor = Fraction(str(config.capacity_factor))  # 1.1 times 10 is 11 and not a little more
    return min(math.ceil(factor * even), sequence)


def drop(
    experts: jax.Array, positions: jax.Array, config: ModelConfig, parallelism: Parallelism
) -> jax.Array:
    """Replace every choice in `experts` int32 [B, S, k] that exceeds its expert's capacity by E.

    An expert takes the first `expert_capacity` tokens of each sequence that chose it, in the order
    of their positions. Capacity belongs to a sequence and not to a batch, which is a deliberate
    choice: whatever sequences share a device or a microbatch, the same tokens are dropped. A
    dropped token keeps its other experts and their gates.

    Args:
        experts: choices of this rank's positions; E stands for none.
        positions: int32 [S], their positions in the sequence: two runs of equal length, each of
            neighbors in ascending order (or one run of odd length).
        config: the model.
        parallelism: how the model is sharded. Ranks with other positions of the sequences tell how
            many of each run chose each expert: 2 E numbers a sequence and rank are gathered.
    """
    if config.capacity_factor is None:
        return experts
    sequences, length, _ = experts.shape
    none = config.num_experts
    # Zig-zag cuts a sequence of C ranks into 2 C pieces, and two of them need not be neighbors.
    # With sequence parallelism a rank has a part of both: if `tensor` is odd, the middle rank's
    # part has as much of the one as of the other, and if it is even no part has more than one.
    runs = 2 if length % 2 == 0 else 1
    chosen = (experts[..., None] == jnp.arange(none, dtype=jnp.int32)).sum(axis=2, dtype=jnp.int32)
    of_run = chosen.reshape(sequences, runs, length // runs, none)
    before = jnp.cumsum(of_run, axis=2, dtype=jnp.int32) - of_run  # in the same run
    first = positions.reshape(runs, -1)[:, 0]
    counts = of_run.sum(axis=2, dtype=jnp.int32)
    for axis in reversed(sequence_axes(parallelism)):
        counts = lax.all_gather(counts, axis, axis=1, tiled=True)
    order = position_order(full_sequence_length(length, parallelism), parallelism)
    firsts = order.reshape(-1, length // runs)[:, 0].astype(np.int32)  # of all ranks, in turn
    earlier = (firsts[None, :] < first[:, None]).astype(jnp.int32)  # [own runs, all runs]
    before = before + jnp.einsum("oa,rae->roe", earlier, counts)[:, :, None]
    before = before.reshape(sequences, length, none)
    here = jnp.take_along_axis(before, jnp.minimum(experts, none - 1), axis=2)
    capacity = expert_capacity(len(order), config)
    return jnp.where(here < capacity, experts, none)
