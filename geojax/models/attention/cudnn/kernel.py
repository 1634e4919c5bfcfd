"""The block kernel by cuDNN's flash attention, for NVIDIA GPUs.

cuDNN rounds a block's output and gradients to the inputs' dtype; they are combined and added in
float32.

Of several documents in a sequence, a block of keys that lies before the queries can share only one
with them: the last of the keys and the first of the queries. So the scores that count are a
rectangle, some leading queries against some trailing keys. The keys are rolled to bring those to
the front, and cuDNN is told their number.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.attention.blocked import MASKED, TILED
from geojax.models.attention.blocks import BlockGradients, Partial, ScoreBlock
from geojax.models.attention.cudnn.packed import (
    CAPACITIES,
    Segments,
    packed_backward,
    packed_forward,
)
from geojax.models.attention.cudnn.primitives import (
    CAUSAL,
    NO_MASK,
    PADDING,
    Sequences,
    flash_backward,
    flash_forward,
)
from geojax.models.attention.operands import ScoreRule

Result = TypeVar("Result", Partial, BlockGradients)


class CudnnKernel:
    """cuDNN as a `Kernel` (see `geojax.models.attention.blocks`).

    `geojax.models.attention.cudnn.support` says what it needs. A window is one of its causal masks;
    keys before the queries have none that begins inside of them, so with a window they are tiled.
    """

    def forward(self, block: ScoreBlock, rule: ScoreRule) -> Partial:
        """Attend with the block's queries to its keys."""
        return _by_window(block, rule, _forward)

    def backward(
        self,
        block: ScoreBlock,
        rule: ScoreRule,
        output: jax.Array,
        log_sum_exp: jax.Array,
        gradient: jax.Array,
    ) -> BlockGradients:
        """Compute the block's contribution to the gradients."""
        saved = output, log_sum_exp, gradient
        return _by_window(block, rule, lambda block, rule: _backward(block, rule, *saved))


CUDNN = CudnnKernel()
"""The cuDNN kernel, which has no settings."""


def _by_window(
    block: ScoreBlock, rule: ScoreRule, attend: Callable[[ScoreBlock, ScoreRule], Result]
) -> Result:
    """Call `attend` with the rule of this block's layer, its window static."""
    if rule.window is None or block.is_windowed is None:
        return attend(block, rule)
    every = block._replace(is_windowed=None)
    return _switch(
        block.is_windowed.astype(jnp.int32),
        lambda: attend(every, rule._replace(window=None)),
        lambda: attend(every, rule),
        dtype=block.query.dtype,
    )


def _forward(block: ScoreBlock, rule: ScoreRule) -> Partial:
    if not block.causal:
        kernel = _forward_before if rule.window is None else TILED.forward
        return kernel(block, rule)
    query, key, value, segment_ids, *_ = block

    def whole() -> Partial:
        output, log_sum_exp = flash_forward(query, key, value, None, CAUSAL, rule)
        return _partial(output, log_sum_exp.transpose(0, 2, 1))

    if segment_ids is None:
        return whole()
    return _by_segments(
        block,
        whole,
        lambda segments, capacity: _partial(
            *packed_forward(query, key, value, segments, rule, capacity)
        ),
        lambda: TILED.forward(block, rule),
    )


def _backward(
    block: ScoreBlock,
    rule: ScoreRule,
    output: jax.Array,
    log_sum_exp: jax.Array,
    gradient: jax.Array,
) -> BlockGradients:
    if not block.causal:
        kernel = _backward_before if rule.window is None else TILED.backward
        return kernel(block, rule, output, log_sum_exp, gradient)
    query, key, value, segment_ids, *_ = block
    sums = log_sum_exp[..., 0]

    def whole() -> BlockGradients:
        saved = output, sums.transpose(0, 2, 1), gradient
        return _gradients(flash_backward(query, key, value, None, CAUSAL, rule, *saved))

    if segment_ids is None:
        return whole()
    return _by_segments(
        block,
        whole,
        lambda segments, capacity: _gradients(
            packed_backward(query, key, value, segments, rule, output, sums, gradient, capacity)
        ),
        lambda: TILED.backward(block, rule, output, log_sum_exp, gradient),
    )


def _by_segments(
    block: ScoreBlock,
    whole: Callable[[], Result],
    packed: Callable[[Segments, int], Result],
    tiled: Callable[[], Result],
) -> Result:
    """Call what suits the most segments in a sequence: `whole` for one, `tiled` for too many.

    The segments are found outside of the branches, so that XLA can find them once for all layers.
    """
    assert block.query_segments is not None, "packed sequences have segments"
    segments = Segments.of(block.query_segments)

    def within(capacity: int) -> Callable[[], Result]:
        return lambda: packed(segments, capacity)

    larger = segments.most > jnp.asarray((1, *CAPACITIES))
    chosen = jnp.sum(larger, dtype=jnp.int32)
    return _switch(chosen, whole, *map(within, CAPACITIES), tiled, dtype=block.query.dtype)


def _switch(chosen: jax.Array, *branches: Callable[[], Result], dtype: jnp.dtype) -> Result:
    """Call the branch of number `chosen`, whose result is rounded to `dtype`, as cuDNN's are.

    Returned in float32 a branch would write it so, and whoever calls would read and write it again.
    """

    def rounded(branch: Callable[[], Result]) -> Callable[[], Result]:
        def call() -> Result:
            result = branch()
            if isinstance(result, Partial):
                return result._replace(output=result.output.astype(dtype))
            return BlockGradients(*(leaf.astype(dtype) for leaf in result))

        return call

    result: Result = lax.switch(chosen, list(map(rounded, branches)))
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), result)


class _Rectangle(NamedTuple):
    """Rectangle of a block's scores that counts, int32 [B]."""

    queries: jax.Array
    """Number of leading queries."""
    keys: jax.Array
    """Number of keys that they see."""
    start: jax.Array
    """First of those keys."""


def _rectangle(block: ScoreBlock) -> _Rectangle | None:
    """Find the rectangle of scores that counts; None: all do."""
    rows, queries = block.query.shape[:2]
    keys = block.key.shape[1]
    if block.query_segments is None or block.key_segments is None:
        if block.key_count is None:
            return None
        count = jnp.broadcast_to(block.key_count, rows).astype(jnp.int32)
        sees = jnp.full_like(count, queries)
        return _Rectangle(jnp.where(count > 0, sees, 0), count, jnp.zeros_like(count))
    end = keys if block.key_count is None else block.key_count
    shared = block.query_segments[:, :1]
    seen = (block.key_segments == shared) & (jnp.arange(keys) < end)
    count = jnp.sum(seen, axis=1, dtype=jnp.int32)
    sees = jnp.sum(block.query_segments == shared, axis=1, dtype=jnp.int32)
    return _Rectangle(jnp.where(count > 0, sees, 0), count, (end - count).astype(jnp.int32))


def _forward_before(block: ScoreBlock, rule: ScoreRule) -> Partial:
    """Attend to keys that lie before all queries."""
    part = _rectangle(block)
    if part is None:
        operands = block.query, block.key, block.value
        output, log_sum_exp = flash_forward(*operands, None, NO_MASK, rule)
        return _partial(output, log_sum_exp.transpose(0, 2, 1))
    operands = block.query, _roll(block.key, -part.start), _roll(block.value, -part.start)
    output, log_sum_exp = flash_forward(*operands, _sequences(part), PADDING, rule)
    result = _partial(output, log_sum_exp.transpose(0, 2, 1))
    seen = _leading(part.queries, output)
    return Partial(jnp.where(seen, result.output, 0), jnp.where(seen, result.log_sum_exp, MASKED))


def _backward_before(
    block: ScoreBlock,
    rule: ScoreRule,
    output: jax.Array,
    log_sum_exp: jax.Array,
    gradient: jax.Array,
) -> BlockGradients:
    part = _rectangle(block)
    sums = log_sum_exp[..., 0].transpose(0, 2, 1)
    if part is None:
        operands = block.query, block.key, block.value
        saved = output, sums, gradient
        return _gradients(flash_backward(*operands, None, NO_MASK, rule, *saved))
    operands = block.query, _roll(block.key, -part.start), _roll(block.value, -part.start)
    d_query, d_key, d_value = _gradients(
        flash_backward(*operands, _sequences(part), PADDING, rule, output, sums, gradient)
    )
    seen = _leading(part.keys, d_key)
    return BlockGradients(
        jnp.where(_leading(part.queries, d_query), d_query, 0),
        _roll(jnp.where(seen, d_key, 0), part.start),
        _roll(jnp.where(seen, d_value, 0), part.start),
    )


def _sequences(part: _Rectangle) -> Sequences:
    # Where nothing counts cuDNN is given one pair all the same, and what it makes of it is dropped.
    return Sequences(jnp.maximum(part.queries, 1), jnp.maximum(part.keys, 1))


def _leading(count: jax.Array, x: jax.Array) -> jax.Array:
    """Mask the first `count` [B] positions of `x` [B, S, ...]; returns bool [B, S, 1, 1]."""
    return (jnp.arange(x.shape[1]) < count[:, None])[:, :, None, None]


def _roll(x: jax.Array, shifts: jax.Array) -> jax.Array:
    """Roll every sequence of `x` [B, S, ...] by its own shift, `shifts` [B]."""
    return jax.vmap(functools.partial(jnp.roll, axis=0))(x, shifts)


def _partial(output: jax.Array, log_sum_exp: jax.Array) -> Partial:
    return Partial(output.astype(log_sum_exp.dtype), log_sum_exp[..., None])


def _gradients(gradients: tuple[jax.Array, jax.Array, jax.Array]) -> BlockGradients:
    wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in gradients)
    return BlockGradients(*wide)
