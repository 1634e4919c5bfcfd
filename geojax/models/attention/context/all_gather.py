"""Attention over `context` with all keys and values gathered, as Llama 3 is trained.

The keys and values of the whole sequence are gathered once. Each of the rank's two pieces of
queries then attends to all positions before it and, causally, to itself. That makes two calls of an
attention kernel for each piece, whatever the number of ranks. With the zig-zag order every rank has
the same work: the chunks c and 2 C - 1 - c together have 2 C - 1 chunks before them.

The gathered keys and values are kept for the backward pass, whose gradients for them are summed and
scattered over the ranks, in at least float32.

Source: "The Llama 3 Herd of Models" (arXiv:2407.21783), section 3.3.2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gathered_attention(
    operands: Operands, rule: ScoreRule, ranks: int, kernel: Kernel
) -> jax.Array:
    """Compute causal attention of this rank's positions to the whole sequence.

    Shapes as in `attention`, S being the rank's two chunks; all arrays vary over the same axes,
    `context` of `ranks` ranks among them.
    """
    return _forward(operands, rule, ranks, kernel)[0]


def _forward(
    operands: Operands, rule: ScoreRule, ranks: int, kernel: Kernel
) -> tuple[jax.Array, tuple[Any, ...]]:
    gathered = jax.tree.map(_gather, (operands.key, operands.value, operands.segment_ids))
    parts = [
        join(kernel.forward(past, rule), kernel.forward(own, rule))
        for past, own in _blocks(operands, gathered, ranks)
    ]
    part = Partial(*(jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True)))
    part = join_sinks(part, operands.sinks)
    output = part.output.astype(operands.query.dtype)
    return output, (operands, gathered, output, part.log_sum_exp)


def _backward(
    rule: ScoreRule, ranks: int, kernel: Kernel, residuals: tuple[Any, ...], gradient: jax.Array
) -> tuple[Operands]:
    operands, gathered, output, log_sum_exp = residuals
    blocks = _blocks(operands, gathered, ranks)
    saved = split_chunks((output, log_sum_exp, gradient))
    of_past, of_own = (
        [kernel.backward(block, rule, *own) for block, own in zip(kind, saved, strict=True)]
        for kind in zip(*blocks, strict=True)
    )

    def of_keys(index: int) -> jax.Array:
        """Sum the gradients of the key or of the value over the ranks."""
        by_first, by_second = (past[index] for past in of_past)
        far = _sum_and_scatter(by_second.at[:, : by_first.shape[1]].add(by_first), ranks)
        return far + jnp.concatenate([own[index] for own in of_own], axis=1)

    d_query = jnp.concatenate(
        [past.query + own.query for past, own in zip(of_past, of_own, strict=True)], axis=1
    )
    gradients = Operands(
        d_query.astype(operands.query.dtype),
        of_keys(1).astype(operands.key.dtype),
        of_keys(2).astype(operands.value.dtype),
        sinks=sinks_gradient(operands.sinks, output, log_sum_exp, gradient),
    )
    return (gradients,)


gathered_attention.defvjp(_forward, _backward)


def _blocks(
    operands: Operands,
    gathered: tuple[jax.Array, jax.Array, jax.Array | None],
    ranks: int,
) -> list[tuple[ScoreBlock, ScoreBlock]]:
    """Return, for each of the two pieces of queries, the blocks before it and on the diagonal."""
    query, key, value, segment_ids, _, is_windowed = operands
    chunk = query.shape[1] // 2
    rank = lax.axis_index("context")
    own = split_chunks((query, key, value, segment_ids))
    # A first chunk is in the first half of the row, and so is all that it sees.
    seen = split_chunks(gathered)[0], gathered
    numbers = rank, 2 * ranks - 1 - rank
    return [
        (
            ScoreBlock(queries, *past[:2], segments, past[2], False, number * chunk, is_windowed),
            ScoreBlock(queries, keys, values, segments, segments, True, is_windowed=is_windowed),
        )
        for number, past, (queries, keys, values, segments) in zip(numbers, seen, own, strict=True)
    ]


def _gather(x: jax.Array) -> jax.Array:
    """Gather [B, S / C, ...] of each rank, in zig-zag order, as [B, S, ...] in natural order."""
    held = lax.all_gather(x, "context", axis=1)
    chunk = x.shape[1] // 2
    chunks = [held[:, :, :chunk], jnp.flip(held[:, :, chunk:], axis=1)]
    return jnp.concatenate(chunks, axis=1).reshape(x.shape[0], -1, *x.shape[2:])


def _sum_and_scatter(x: jax.Array, ranks: int) -> jax.Array:
    """Transpose `_gather`: sum [B, S, ...] over the ranks and scatter to [B, S / C, ...]."""
    chunks = x.reshape(x.shape[0], 2 * ranks, -1, *x.shape[2:])
    held = jnp.concatenate([chunks[:, :ranks], jnp.flip(chunks[:, ranks:], axis=1)], axis=2)
    return lax.psum_scatter(held, "context", scatter_dimension=1)
