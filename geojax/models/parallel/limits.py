"""Checks that a model and its sequences can be sharded over given numbers of ranks."""

import math

from geojax.errors import UserError
from geojax.models.attention.context.methods import context_unsupported_reason
from geojax.models.config import ModelConfig
from geojax.models.own.parts import own_parts
from geojax.models.own.settings import AnyModel, OwnModel
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.sequence_order import position_multiple


def check_parallelism(config: AnyModel, parallelism: Parallelism, sequence: int) -> None:
    """Refuse sizes that do not divide and cannot be padded; touches no device.

    The size of the vocabulary sets no limit: it is padded to a multiple of the ranks that share it.

    Args:
        config: the model.
        parallelism: how it is to be sharded.
        sequence: length of a whole sequence.

    Raises:
        UserError: heads, key and value heads, feed-forward width, experts or the sequence cannot be
            sharded; the message names sizes that work.
    """
    if isinstance(config, OwnModel):
        reason = _own_unsupported_reason(config, parallelism, sequence)
    else:
        reason = _unsupported_reason(config, parallelism, sequence)
    if reason:
        raise UserError(reason)


def _own_unsupported_reason(model: OwnModel, parallelism: Parallelism, sequence: int) -> str | None:
    """Say what of the layers of geojax, or of the sequence, cannot be sharded; None: all can."""
    if parallelism.vocabulary_stages > 1:
        return "a model of your own has its head whole on each rank; pipeline.head=positions works"
    parts = own_parts(model)
    parts.check(parallelism)
    for config in (each for part in parts.period for each in part.of_geojax):
        if reason := _unsupported_reason(config, parallelism, sequence):
            return reason
    any_heads = parallelism.tensor * parallelism.context  # of modules that are not geojax's
    return context_unsupported_reason(
        parallelism, sequence=sequence, heads=any_heads
    ) or _sequence_unsupported_reason(parallelism, sequence)


def _unsupported_reason(config: ModelConfig, parallelism: Parallelism, sequence: int) -> str | None:
    return (
        _tensor_unsupported_reason(config, parallelism.tensor)
        or context_unsupported_reason(
            parallelism,
            sequence=sequence,
            heads=config.num_attention_heads,
            window=config.sliding_window,
        )
        or _sequence_unsupported_reason(parallelism, sequence)
        or _later_tokens_unsupported_reason(config, parallelism.context)
        or _expert_unsupported_reason(config, parallelism.expert)
        or _vocabulary_unsupported_reason(config, parallelism.vocabulary_stages)
    )


def _tensor_unsupported_reason(config: ModelConfig, ranks: int) -> str | None:
    reason = _unshared(config, ranks)
    if reason is None:
        return None
    fitting = [
        size for size in range(1, config.num_attention_heads + 1) if _unshared(config, size) is None
    ]
    return f"tensor parallelism over {ranks} ranks: {reason}; tensor can be {_either(fitting)}"


def _unshared(config: ModelConfig, ranks: int) -> str | None:
    """Say which size of a layer `ranks` ranks of `tensor` cannot share; None: they can."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks:
        return f"num_attention_heads {heads} is not a multiple of it"
    if kv_heads % ranks and ranks % kv_heads:
        return f"num_key_value_heads {kv_heads} is neither a multiple nor a divisor of it"
    widths = ["moe_intermediate_size"] if config.is_moe else []
    if not config.is_moe or config.first_k_dense_replace:
        widths.append("intermediate_size")
    for width in widths:
        if (size := getattr(config, width)) % ranks:
            return f"{width} {size} is not a multiple of it"
    return None


def _sequence_unsupported_reason(parallelism: Parallelism, sequence: int) -> str | None:
    """Say why `tensor` cannot shard the positions of the residual stream; None: it can."""
    ranks = parallelism.context * parallelism.tensor
    if not parallelism.sequence:
        return None
    if sequence % ranks == 0:
        positions, chunks = sequence // ranks, parallelism.chunks
        if positions % chunks == 0:
            return None
        fitting = [size for size in (1, 2, 4, 8) if positions % size == 0]
        return (
            f"parallelism.chunks={chunks} divides the {positions} positions that a rank of tensor "
            f"holds, and they are not a multiple of it; {_either(fitting)} would work"
        )
    multiple = math.lcm(ranks, position_multiple(parallelism))
    below = sequence // multiple * multiple
    context = f" of each of {parallelism.context} context ranks" if parallelism.context > 1 else ""
    return (
        f"sequence parallelism deals out the positions{context} to {parallelism.tensor} tensor "
        f"ranks, so the sequence must be a multiple of {multiple}, and it is {sequence}; "
        f"{_either([size for size in (below, below + multiple) if size])} would work"
    )


def _later_tokens_unsupported_reason(config: ModelConfig, ranks: int) -> str | None:
    if ranks == 1 or not config.num_nextn_predict_layers:
        return None
    return (
        f"context parallelism over {ranks} ranks: later tokens lie on other ranks; "
        "num_nextn_predict_layers=0 or context=1 would work"
    )


def _expert_unsupported_reason(config: ModelConfig, ranks: int) -> str | None:
    if not config.is_moe or config.num_experts % ranks == 0:
        return None
    experts = config.num_experts
    fitting = [size for size in range(1, experts + 1) if experts % size == 0]
    return (
        f"expert parallelism over {ranks} ranks: num_experts {experts} is not a multiple of it; "
        f"expert can be {_either(fitting)}"
    )


def _vocabulary_unsupported_reason(config: ModelConfig, stages: int) -> str | None:
    if stages == 1 or not config.first_k_dense_replace:
        return None
    return (
        f"{stages} stages share the vocabulary: the first dense layers come with the table of "
        "tokens, which each has a part of; pipeline.head=positions would work"
    )


def _either(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
