"""Ring attention: blocks of keys and values travel around the ranks of `context`.

Every rank keeps its queries. In step i it works on the keys of the rank i places before it, while
those of step i + 1 are on their way. Sequences are cut in zig-zag order, so of the block of another
rank exactly half counts, whichever rank it is from, and no masked score is computed:

    from an earlier rank    first half of keys      against both halves of queries
    from a later rank       both halves of keys     against the second half of queries

Both are two pieces of half against half, and one of the two is common: the second half of queries
against the first half of keys. Only the other piece depends on the rank: the same program, without
a branch, gives every rank the same work. A kernel sees the two pieces side by side, as twice the
batch.

Backwards the keys and values travel again, and the gradients of a block follow it around the ring,
each rank adding its part. They go the other way round, so that no compiler that sees both passes
can take the second journey for the first and keep all blocks in between. The own block's work
waits for no transfer and comes in two pieces: one can hide the first transfer, the other the last.

The steps are a loop: in its body the transfer and the work do not depend on each other, which is
what it takes to overlap them, and the program does not grow with the ring. (Unrolled, XLA for CPUs
fused each step's sums with those of all steps before it, time and again.)

Source: H. Liu, M. Zaharia and P. Abbeel, "Ring Attention with Blockwise Transformers"
(arXiv:2310.01889); the order of the chunks is that of "The Llama 3 Herd of Models"
(arXiv:2407.21783), section 3.3.2.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import Tree
from geojax.models.attention.blocks import (
    Kernel,
    Partial,
    ScoreBlock,
    join,
    join_sinks,
    sinks_gradient,
)
from geojax.models.attention.operands import Operands, ScoreRule
from geojax.models.parallel.sequence_order import split_chunks


class _KeyValueBlock(NamedTuple):
    """Block of keys and values that a rank holds in this step."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def ring_attention(operands: Operands, rule: ScoreRule, ranks: int, kernel: Kernel) -> jax.Array:
    """Compute causal attention of this rank's positions to the whole sequence.

    Shapes as in `attention`, S being the rank's two chunks; all arrays vary over the same axes,
    `context` of `ranks` ranks (at least two) among them.
    """
    return _forward(operands, rule, ranks, kernel)[0]


class _Attended(NamedTuple):
    """State of a rank in the forward pass."""

    block: _KeyValueBlock
    first: Partial
    """Attention of the first chunk of queries so far."""
    second: Partial


def _forward(
    operands: Operands, rule: ScoreRule, ranks: int, kernel: Kernel
) -> tuple[jax.Array, tuple[Any, ...]]:
    query, key, value, segment_ids, sinks, _ = operands
    rank = lax.axis_index("context")
    onwards = functools.partial(_send, ranks=ranks, distance=1)

    def visit(step: jax.Array | int, state: _Attended, *, last: bool) -> _Attended:
        block, first, second = state
        arriving = block if last else onwards(block)
        earlier = rank >= step
        pairs = _pairs(query, segment_ids, block, earlier)
        common, other = _split_batch(kernel.forward(pairs, rule))
        second = join(second, common)
        joined = join(_choose(earlier, first, second), other)
        return _Attended(arriving, *_choose(earlier, (joined, second), (first, joined)))

    arriving = onwards(_KeyValueBlock(key, value, segment_ids))
    own = ScoreBlock(query, key, value, segment_ids, segment_ids, causal=True)
    state = _Attended(arriving, *split_chunks(kernel.forward(own, rule)))
    if ranks > 2:
        state = lax.fori_loop(1, ranks - 1, functools.partial(visit, last=False), state)
    _, first, second = visit(ranks - 1, state, last=True)
    part = join_sinks(_join_chunks(first, second), sinks)
    output = part.output.astype(query.dtype)
    return output, (operands, output, part.log_sum_exp)


class _Returning(NamedTuple):
    """State of a rank in the backward pass."""

    block: _KeyValueBlock
    block_gradients: tuple[jax.Array, ...] | None
    """Gradients so far of the keys and values that this rank held in the last step."""
    of_query: jax.Array


def _backward(
    rule: ScoreRule, ranks: int, kernel: Kernel, residuals: tuple[Any, ...], gradient: jax.Array
) -> tuple[Operands]:
    operands, output, log_sum_exp = residuals
    query, key, value, segment_ids, sinks, _ = operands
    rank = lax.axis_index("context")
    onwards = functools.partial(_send, ranks=ranks, distance=-1)
    saved = split_chunks((output, log_sum_exp, gradient))
    own = _KeyValueBlock(key, value, segment_ids)
    diagonal, below_diagonal = _own_pairs(query, own)

    def visit(step: jax.Array | int, state: _Returning, *, last: bool) -> _Returning:
        block, block_gradients, of_query = state
        arriving = block if last else onwards(block)
        arrived = None if block_gradients is None else onwards(block_gradients)
        earlier = rank + step >= ranks
        pairs = _pairs(query, segment_ids, block, earlier)
        of_pairs = _side_by_side(saved[1], _choose(earlier, *saved))
        common, other = _split_batch(kernel.backward(pairs, rule, *of_pairs))
        in_first, in_second = _in_chunk(earlier, other)
        of_query = of_query + _join_chunks(in_first.query, common.query + in_second.query)
        of_keys = _join_chunks(_add(common[1:], in_first[1:]), in_second[1:])
        return _Returning(
            arriving, of_keys if arrived is None else _add(arrived, of_keys), of_query
        )

    arriving = onwards(own)
    on_diagonal = kernel.backward(diagonal, rule, *_side_by_side(*saved))
    of_query, *of_own = _join_chunks(*_split_batch(on_diagonal))
    state = visit(1, _Returning(arriving, None, of_query), last=ranks == 2)
    if ranks > 3:
        state = lax.fori_loop(2, ranks - 1, functools.partial(visit, last=False), state)
    if ranks > 2:
        state = visit(ranks - 1, state, last=True)
    assert state.block_gradients is not None, (
        "every step makes gradients of the keys that it works on"
    )
    arrived = onwards(state.block_gradients)
    below = kernel.backward(below_diagonal, rule, *saved[1])
    chunk = query.shape[1] // 2
    d_query = state.of_query.at[:, chunk:].add(below.query)
    d_key, d_value = (
        (one + other).at[:, :chunk].add(of_below)
        for one, other, of_below in zip(of_own, arrived, below[1:], strict=True)
    )
    gradients = Operands(
        d_query.astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        sinks=sinks_gradient(sinks, output, log_sum_exp, gradient),
    )
    return (gradients,)


ring_attention.defvjp(_forward, _backward)


def _send(tree: Tree, *, ranks: int, distance: int) -> Tree:
    """Send to the rank at `distance` in the ring; return what arrives."""
    hops = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda x: lax.ppermute(x, "context", hops), tree)


def _pairs(
    query: jax.Array, segment_ids: jax.Array | None, block: _KeyValueBlock, earlier: jax.Array
) -> ScoreBlock:
    """Pair the halves common to all ranks with those that depend on the block's owner."""
    queries, keys = split_chunks((query, segment_ids)), split_chunks(block)
    of_queries = _side_by_side(queries[1], _choose(earlier, *queries))
    of_keys = _side_by_side(keys[0], _choose(earlier, *keys))
    return _block(of_queries, of_keys, causal=False)


def _own_pairs(query: jax.Array, own: _KeyValueBlock) -> tuple[ScoreBlock, ScoreBlock]:
    """Pair each chunk with itself, side by side; and the second's queries with the first's keys."""
    queries, keys = split_chunks((query, own.segments)), split_chunks(own)
    diagonal = _block(_side_by_side(*queries), _side_by_side(*keys), causal=True)
    return diagonal, _block(queries[1], keys[0], causal=False)


def _block(
    queries: tuple[jax.Array, jax.Array | None], keys: _KeyValueBlock, *, causal: bool
) -> ScoreBlock:
    return ScoreBlock(queries[0], keys.key, keys.value, queries[1], keys.segments, causal)


def _choose(condition: jax.Array, one: Tree, other: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _in_chunk(earlier: jax.Array, tree: Tree) -> tuple[Tree, Tree]:
    """Return `tree` for the first chunks and zeros for the second, or the other way round."""
    zeros = jax.tree.map(jnp.zeros_like, tree)
    return _choose(earlier, tree, zeros), _choose(earlier, zeros, tree)


def _add(one: Tree, other: Tree) -> Tree:
    return jax.tree.map(jnp.add, one, other)


def _join_chunks(first: Tree, second: Tree) -> Tree:
    """Invert `split_chunks`."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


def _side_by_side(one: Tree, other: Tree) -> Tree:
    """Concatenate arrays [B, ...] of both to [2 B, ...]."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), one, other)


def _split_batch(tree: Tree) -> tuple[Tree, Tree]:
    """Invert `_side_by_side`."""
    one = jax.tree.map(lambda x: x[: x.shape[0] // 2], tree)
    other = jax.tree.map(lambda x: x[x.shape[0] // 2 :], tree)
    return one, other
