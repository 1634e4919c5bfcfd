"""`geojax.models.Decoder`: a model of anybody's modules.

    tokens [B, S] ─► embedding ─► block ─► block ─► ... ─► head ─► logits [B, S, V]

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

from collections.abc import Sequence

from flax import nnx


class Decoder(nnx.Module):
    """An embedding, blocks and a head, each a module of Flax.

    A part whose `__call__` has an argument called `context` is given a `LayerContext`; the others
    are called with the stream alone.

    Args:
        embedding: maps tokens int32 [B, S] to the stream [B, S, H].
        blocks: each maps the stream to the stream. The shortest period after which modules, shapes
            and settings repeat becomes one layer of geojax, so that one program computes all of
            them.
        head: maps the stream to logits, each position by itself. A parameter that is also one of
            the embedding's is tied to it.
    """

    def __init__(self, embedding: nnx.Module, blocks: Sequence[nnx.Module], head: nnx.Module):
        self.embedding, self.blocks, self.head = embedding, nnx.List(blocks), head
