"""Context parallelism: choice of the method, and the sizes that it works with."""

import jax

from geojax.collectives.axes import axis_sizes, vary_over, varying_axes
from geojax.errors import UserError
from geojax.models.attention.blocks import Kernel
from geojax.models.attention.context.all_gather import gathered_attention
from geojax.models.attention.context.ring import ring_attention
from geojax.models.attention.context.ulysses import Attention, ulysses_attention
from geojax.models.attention.operands import Operands, ScoreRule
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.sequence_order import position_multiple


def context_attention(
    operands: Operands,
    rule: ScoreRule,
    parallelism: Parallelism,
    *,
    unsharded_sequence: Attention,
    kernel: Kernel | None,
) -> jax.Array:
    """Compute causal attention of this rank's positions, by `parallelism.context_method`.

    Args:
        operands: as in `attention`, S being the rank's positions.
        rule: of the scores.
        parallelism: with a `context` of several ranks.
        unsharded_sequence: the implementation, for unsharded sequences (ulysses).
        kernel: the same implementation by blocks (ring, all_gather); None: it has none.

    Raises:
        UserError: not inside a `shard_map` over such an axis, sizes or an implementation that the
            method does not work with.
    """
    ranks, method = parallelism.context, parallelism.context_method
    size = axis_sizes(["context"])["context"]
    if size != ranks:
        raise UserError(f"attention: the mesh's context axis has {size} ranks, not {ranks}")
    reason = context_unsupported_reason(
        parallelism,
        sequence=operands.query.shape[1] * ranks,
        heads=operands.query.shape[2] * parallelism.tensor,
        window=rule.window,
    )
    if reason:
        raise UserError(f"attention: {reason}")
    operands = vary_over(operands, varying_axes(operands) | {"context"})
    if method == "ulysses":
        return ulysses_attention(operands, rule, ranks, unsharded_sequence)
    if kernel is None:
        raise UserError(
            "attention: the reference implementation needs whole sequences, which context "
            f"parallelism by {method} never has; use blocked or auto"
        )
    by_blocks = ring_attention if method == "ring" else gathered_attention
    return by_blocks(operands, rule, ranks, kernel)


def context_unsupported_reason(
    parallelism: Parallelism, *, sequence: int, heads: int, window: int | None = None
) -> str | None:
    """Say why sequences of length `sequence` cannot be sharded over `context`; None: they can.

    Args:
        parallelism: how the model is sharded.
        sequence: length of a whole sequence.
        heads: query heads of the whole model. (Any number of key heads works: ulysses repeats those
            that several ranks need.)
        window: keys that a query sees in some layers; None: all before it, everywhere.
    """
    ranks, method = parallelism.context, parallelism.context_method
    if ranks == 1:
        return None
    if method == "ring" and window is not None and window < sequence:
        return (
            f"a ring over context sends every block around, and a window of {window} leaves most "
            "unseen; the methods all_gather and ulysses would work"
        )
    multiple = position_multiple(parallelism)
    if sequence % multiple or not sequence:
        below = sequence // multiple * multiple
        near = f"{below} or {below + multiple}" if below else f"{multiple}"
        return (
            f"context parallelism by {method} over {ranks} ranks needs a sequence that is a "
            f"multiple of {multiple}, and it is {sequence}; {near} would work"
        )
    local = heads // parallelism.tensor
    if method == "ulysses" and local % ranks:
        sizes = ", ".join(str(size) for size in range(1, local + 1) if local % size == 0)
        share = f" on each of {parallelism.tensor} tensor ranks" if parallelism.tensor > 1 else ""
        return (
            f"context parallelism by ulysses deals out {local} query heads{share} to {ranks} "
            f"ranks; a context of {sizes} would work, or the methods ring and all_gather"
        )
    return None
