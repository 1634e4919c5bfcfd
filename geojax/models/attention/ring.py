"""Ring attention: blocks of keys and values travel around the ranks of `context`.

Every rank keeps its queries. In step i it works on the keys that it held i ranks before it, while
those of step i + 1 are on their way. Rows are cut in zig-zag order, so of the block of another rank
exactly half counts, whichever rank it is from, and no masked score is computed:

    from an earlier rank    first chunk of keys     against both chunks of queries
    from a later rank       both chunks of keys     against the second chunk of queries

Both are two pieces of chunk against chunk, and one of the two is common: the second chunk of
queries against the first chunk of keys. Only what the other piece is made of depends on the rank:
the same program, without a branch, gives every rank the same work.

Backwards the keys and values travel again, and the gradients of a block follow it around the ring,
each rank adding its part. The steps are unrolled rather than scanned: a loop's body is a wall for
the compiler's scheduler, and unrolled the own block's work, which waits for nobody, can also hide
the first transfer and the gradients' last one; nor are the blocks copied into a carry.

Source: H. Liu, M. Zaharia and P. Abbeel, "Ring Attention with Blockwise Transformers"
(arXiv:2310.01889); the order of the chunks is that of "The Llama 3 Herd of Models"
(arXiv:2407.21783), section 3.3.2.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.attention.blocks import Block, Gradients, Kernel, join
from geojax.models.sequence_order import split_chunks
from geojax.models.varying import Tree


class _Held(NamedTuple):
    """The block of keys and values that a rank has at the moment."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    ranks: int,
    kernel: Kernel,
) -> jax.Array:
    """Causal attention of this rank's columns to the whole row.

    Shapes as in `attention`, T being the rank's two chunks; all arrays vary over the same axes,
    `context` of `ranks` ranks among them.
    """
    return _forward(query, key, value, segment_ids, scale, ranks, kernel)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    ranks: int,
    kernel: Kernel,
) -> tuple[jax.Array, tuple[Any, ...]]:
    rank = lax.axis_index("context")
    arriving = _pass_on(_Held(key, value, segment_ids), ranks)
    own = Block(query, key, value, segment_ids, segment_ids, causal=True)
    first, second = split_chunks(kernel.forward(own, scale))
    for step in range(1, ranks):
        held = arriving
        if step + 1 < ranks:
            arriving = _pass_on(held, ranks)
        earlier = rank >= step
        common, other = _pieces(query, segment_ids, held, earlier)
        second = join(second, kernel.forward(common, scale))
        added = kernel.forward(other, scale)
        joined = join(_choose(earlier, first, second), added)
        first = _choose(earlier, joined, first)
        second = _choose(earlier, second, joined)
    output, log_sum_exp = (jnp.concatenate(x, axis=1) for x in zip(first, second, strict=True))
    output = output.astype(query.dtype)
    return output, (query, key, value, segment_ids, output, log_sum_exp)


def _backward(
    scale: float, ranks: int, kernel: Kernel, residuals: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, segment_ids, output, log_sum_exp = residuals
    # Without the barrier a compiler that sees both passes takes the second round of transfers for
    # the first, and keeps every rank's block from the one to the other.
    key, value, segment_ids, gradient = lax.optimization_barrier(
        (key, value, segment_ids, gradient)
    )
    rank = lax.axis_index("context")
    saved = split_chunks((output, log_sum_exp, gradient))
    arriving = _pass_on(_Held(key, value, segment_ids), ranks)
    own = Block(query, key, value, segment_ids, segment_ids, causal=True)
    d_query, *d_own = kernel.backward(own, scale, output, log_sum_exp, gradient)
    d_first, d_second = split_chunks(d_query)
    following: list[jax.Array] = []
    for step in range(1, ranks):
        held = arriving
        if step + 1 < ranks:
            arriving = _pass_on(held, ranks)
        following = _pass_on(following, ranks)
        earlier = rank >= step
        common, other = _pieces(query, segment_ids, held, earlier)
        of_common = kernel.backward(common, scale, *saved[1])
        of_other = kernel.backward(other, scale, *_choose(earlier, *saved))
        in_first, in_second = _share(earlier, of_other)
        d_first = d_first + in_first.query
        d_second = d_second + of_common.query + in_second.query
        added = [
            jnp.concatenate([a + b, c], axis=1)
            for a, b, c in zip(of_common[1:], in_first[1:], in_second[1:], strict=True)
        ]
        following = [a + b for a, b in zip(following, added, strict=True)] if following else added
    d_key, d_value = (a + b for a, b in zip(d_own, _pass_on(following, ranks), strict=True))
    return (
        jnp.concatenate([d_first, d_second], axis=1).astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        None,
    )


ring_attention.defvjp(_forward, _backward)


def _pass_on(tree: Tree, ranks: int) -> Tree:
    """What the rank before this one has; the last is before the first."""
    hops = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda x: lax.ppermute(x, "context", hops), tree)


def _pieces(
    query: jax.Array, segment_ids: jax.Array | None, held: _Held, earlier: jax.Array
) -> tuple[Block, Block]:
    """The piece that every rank computes, and the one that depends on where the keys come from."""
    queries = split_chunks((query, segment_ids))
    keys = split_chunks(held)

    def block(queries: tuple[jax.Array, jax.Array | None], keys: _Held) -> Block:
        query, segments = queries
        return Block(query, keys.key, keys.value, segments, keys.segments, causal=False)

    return block(queries[1], keys[0]), block(*_choose(earlier, *zip(queries, keys, strict=True)))


def _choose(condition: jax.Array, one: Tree, other: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _share(earlier: jax.Array, gradients: Gradients) -> tuple[Gradients, Gradients]:
    """`gradients` for the first chunks and zeros for the second, or the other way round."""
    zeros = jax.tree.map(jnp.zeros_like, gradients)
    return _choose(earlier, gradients, zeros), _choose(earlier, zeros, gradients)
