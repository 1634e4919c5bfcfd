"""Which numbers of ranks a model and its rows can be spread over."""

import math

from geojax.errors import UserError
from geojax.models.attention.context.methods import context_obstacle
from geojax.models.config import ModelConfig
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.sequence_order import column_multiple


def check_parallelism(config: ModelConfig, parallelism: Parallelism, sequence: int) -> None:
    """Refuse sizes that do not divide and that nothing can be padded to; touches no device.

    The vocabulary is no obstacle: it is padded to a multiple of `tensor`.

    Args:
        config: the model.
        parallelism: how it is to be spread.
        sequence: columns of a whole row.

    Raises:
        UserError: heads, key and value heads, feed_forward, experts or the sequence cannot be
            shared out; with the sizes that would work.
    """
    obstacle = (
        _tensor_obstacle(config, parallelism.tensor)
        or context_obstacle(parallelism, sequence=sequence, heads=config.heads)
        or _stream_obstacle(parallelism, sequence)
        or _expert_obstacle(config, parallelism.expert)
    )
    if obstacle:
        raise UserError(obstacle)


def _tensor_obstacle(config: ModelConfig, ranks: int) -> str | None:
    reason = _unshared(config, ranks)
    if reason is None:
        return None
    fitting = [size for size in range(1, config.heads + 1) if _unshared(config, size) is None]
    return f"tensor parallelism over {ranks} ranks: {reason}; tensor can be {_either(fitting)}"


def _unshared(config: ModelConfig, ranks: int) -> str | None:
    """What of a layer `ranks` ranks of `tensor` cannot share, or None."""
    if config.heads % ranks:
        return f"heads {config.heads} is not a multiple of it"
    if config.kv_heads % ranks and ranks % config.kv_heads:
        return f"key_value_heads {config.kv_heads} is neither a multiple nor a divisor of it"
    if config.feed_forward % ranks:
        return f"feed_forward {config.feed_forward} is not a multiple of it"
    return None


def _stream_obstacle(parallelism: Parallelism, sequence: int) -> str | None:
    """What keeps the ranks of `tensor` from sharing the columns of the residual stream."""
    ranks = parallelism.context * parallelism.tensor
    if not parallelism.sequence or sequence % ranks == 0:
        return None
    multiple = math.lcm(ranks, column_multiple(parallelism))
    below = sequence // multiple * multiple
    context = f" of each of {parallelism.context} context ranks" if parallelism.context > 1 else ""
    return (
        f"sequence parallelism deals out the columns{context} to {parallelism.tensor} tensor "
        f"ranks, so the sequence must be a multiple of {multiple}, and it is {sequence}; "
        f"{_either([size for size in (below, below + multiple) if size])} would work"
    )


def _expert_obstacle(config: ModelConfig, ranks: int) -> str | None:
    if config.mixture is None or config.mixture.experts % ranks == 0:
        return None
    experts = config.mixture.experts
    fitting = [size for size in range(1, experts + 1) if experts % size == 0]
    return (
        f"expert parallelism over {ranks} ranks: experts {experts} is not a multiple of it; "
        f"expert can be {_either(fitting)}"
    )


def _either(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
