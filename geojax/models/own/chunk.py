"""The passes of a model of your own: its parts as the pieces of a `Chunk`, and its loss.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import vary_over, varying_axes
from geojax.errors import UserError
from geojax.models.chunk.chunk import Chunk, ModelFunctions
from geojax.models.chunk.layer_scan import Layers, LayerSpan
from geojax.models.chunk.remat import Remat, rematerialize
from geojax.models.context import ComputeSettings, LayerContext
from geojax.models.declaration import Parameters
from geojax.models.head import token_chunks
from geojax.models.own.parts import OwnParts, Part, own_parts
from geojax.models.own.settings import OwnModel
from geojax.models.parallel.sequence_order import local_positions


def own_chunk(
    model: OwnModel,
    layers: range,
    dtype: jnp.dtype,
    compute: ComputeSettings,
    *,
    dropout_key: jax.Array | None,
    remat: Remat,
) -> Chunk:
    """Return the chunk of consecutive `layers` of a model; see `model_chunk`."""
    parts = own_parts(model, compute)

    def context_of(batch: dict[str, jax.Array]) -> LayerContext:
        return LayerContext(
            segment_ids=batch["segment_ids"],
            positions=batch["positions"],
            rotary=None,
            local_rotary=None,
            sequence_indices=batch["row"],
            sequence_positions=local_positions(batch["tokens"].shape[1], compute.parallelism),
            dropout_key=dropout_key,
        )

    def embed(first: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
        return parts.embedding(first, batch["tokens"], context_of(batch)).astype(dtype)

    def layer(
        weights: Parameters, x: jax.Array, index: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, None]:
        trees = parts.in_period(weights)
        for place, (part, own) in enumerate(zip(parts.period, trees, strict=True)):
            of_block = context._replace(layer=len(trees) * index + place)
            x = _same_stream(part, part(own, x, of_block), x)
        return x, None

    functions = ModelFunctions(
        embed=embed,
        layer=rematerialize(layer, remat, keep_all_names=True),
        head=lambda last, x, batch: own_loss(model, parts, last, x, batch),
        context=context_of,
    )
    spans = Layers((LayerSpan(len(layers), functions.layer),), layers.start)
    return Chunk(functions, spans, layers.start == 0, layers.stop == parts.layers)


def own_logits(parts: OwnParts, last: Parameters, x: jax.Array) -> jax.Array:
    """Call the head on the stream `x` [B, S, H]: [B, S, V], in at least float32.

    Of `last` it reads what `read_by_own_head` returns.
    """
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    context = LayerContext(None, None, None, None, positions)
    made = parts.head(last["head"], x, context, last.get("embedding"))
    return made.astype(jnp.promote_types(made.dtype, jnp.float32))


def own_loss(
    model: OwnModel, parts: OwnParts, last: Parameters, x: jax.Array, batch: dict[str, jax.Array]
) -> jax.Array:
    """Sum the masked next-token losses of the stream `x` [B, S, H]: [], in at least float32.

    Tokens go through the head in chunks; the backward computes each chunk's logits again.
    """
    targets, mask = batch["targets"], batch["loss_mask"]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    chunks = token_chunks(
        (x.reshape(-1, x.shape[-1]), targets.reshape(-1), mask.reshape(-1).astype(wide)),
        model.vocab_size,
        wide.itemsize,
    )

    @jax.checkpoint
    def of_chunk(last: Parameters, hidden: jax.Array, targets: Any, mask: Any) -> jax.Array:
        # A masked token's hidden state may be anything, and 0 times infinity is not 0.
        hidden = jnp.where(mask[:, None] != 0, hidden, 0)
        logits = own_logits(parts, last, hidden[None])[0]
        if logits.shape != (len(targets), model.vocab_size):
            raise UserError(
                f"model.module {model.module}: {parts.head.kind} maps the stream "
                f"{(1, *hidden.shape)} to {(1, *logits.shape)}; "
                f"{(1, len(targets), model.vocab_size)} would be logits of the vocabulary"
            )
        own = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return jnp.sum((jax.nn.logsumexp(logits, axis=-1) - own) * mask)

    def add(total: jax.Array, chunk: Any) -> tuple[jax.Array, None]:
        return total + of_chunk(last, *chunk), None

    zero = vary_over(jnp.zeros((), wide), varying_axes(x, last, targets, mask))
    return lax.scan(add, zero, chunks, unroll=len(chunks[1]) == 1)[0]


def read_by_own_head(parameters: Parameters, parts: OwnParts) -> Parameters:
    """Return the part of the parameters that the head reads: its own, and those it is tied to."""
    read: Parameters = {"head": parameters["head"]}
    for path in parts.head.tied.values():
        place, source = read.setdefault("embedding", {}), parameters["embedding"]
        for entry in map(str, path[:-1]):
            place, source = place.setdefault(entry, {}), source[entry]
        place[str(path[-1])] = source[str(path[-1])]
    return read


def _same_stream(part: Part, made: jax.Array, x: jax.Array) -> jax.Array:
    """Check that a block returned a stream; it goes on in the dtype of `x`."""
    if getattr(made, "shape", None) != x.shape:
        shape = getattr(made, "shape", type(made).__name__)
        raise UserError(f"{part.kind} maps the stream {x.shape} to {shape}; it must keep the shape")
    return made.astype(x.dtype)
