"""The passes of a model of your own: its parts as the pieces of a `Chunk`, and its loss.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import lax

from geojax.collectives.axes import vary_over, varying_axes
from geojax.errors import UserError
from geojax.models.chunk.chunk import Chunk, ModelFunctions
from geojax.models.chunk.layer_scan import Layer, Layers, LayerSpan
from geojax.models.chunk.remat import Remat, rematerialize
from geojax.models.context import ComputeSettings, LayerContext
from geojax.models.declaration import Parameters
from geojax.models.frozen import unmarked
from geojax.models.head import token_chunks
from geojax.models.lora import scale_adapters
from geojax.models.moe import weighted_aux_loss
from geojax.models.own.parts import OwnParts, Part, own_parts
from geojax.models.own.settings import OwnModel
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.sequence_order import local_positions
from geojax.models.parallel.shares import share_of_targets
from geojax.models.parallel.tensor import stream_positions
from geojax.precision import LinearMatmul


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
    parts, parallelism, matmul = own_parts(model, compute), compute.parallelism, compute.matmul

    def context_of(batch: dict[str, jax.Array]) -> LayerContext:
        return LayerContext(
            segment_ids=batch["segment_ids"],
            positions=batch["positions"],
            rotary=None,
            local_rotary=None,
            sequence_indices=batch["row"],
            sequence_positions=local_positions(batch["tokens"].shape[1], parallelism),
            dropout_key=dropout_key,
        )

    def embed(first: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
        x = parts.embedding(unmarked(first), batch["tokens"], context_of(batch)).astype(dtype)
        return stream_positions(x, parallelism, dim=1)

    def layer_with(own: LinearMatmul, *, of_any_number: bool = False) -> Layer:
        blocks = own_parts(model, dataclasses.replace(compute, matmul=own))

        def layer(
            weights: Parameters, x: jax.Array, index: jax.Array, context: LayerContext
        ) -> tuple[jax.Array, jax.Array | None]:
            if of_any_number:
                follows = own.at_layer(index, parts.layers).quantized
                context = context._replace(follows_recipe=follows)
            weights = unmarked(weights)
            if model.lora is not None:
                weights = scale_adapters(weights, model.lora)
            trees, balance = blocks.in_period(weights), None
            for place, (part, tree) in enumerate(zip(blocks.period, trees, strict=True)):
                of_block = context._replace(layer=len(trees) * index + place)
                x, added = _stream_and_balance(part, part(tree, x, of_block), x)
                if added is not None:
                    balance = added if balance is None else balance + added
            return x, balance

        return rematerialize(layer, remat, keep_all_names=True)

    def balance(losses: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        return weighted_aux_loss(losses, batch["loss_mask"])

    functions = ModelFunctions(
        embed=embed,
        layer=layer_with(matmul, of_any_number=True),
        head=lambda last, x, batch: own_loss(model, parts, unmarked(last), x, batch, parallelism),
        context=context_of,
        balance=balance if model.is_moe else None,
        head_share=functools.partial(share_of_targets, parallelism=parallelism),
    )
    spans = [
        LayerSpan(len(part), layer_with(own))
        for part, own in matmul.spans_within(layers, parts.layers)
    ]
    is_first, is_last = layers.start == 0, layers.stop == parts.layers
    return Chunk(functions, Layers(tuple(spans), layers.start), is_first, is_last)


def own_logits(parts: OwnParts, last: Parameters, x: jax.Array) -> jax.Array:
    """Call the head on the stream `x` [B, S, H]: [B, S, V], in at least float32.

    Of `last` it reads what `read_by_own_head` returns.
    """
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    context = LayerContext(None, None, None, None, positions)
    made = parts.head(last["head"], x, context, last.get("embedding"))
    return made.astype(jnp.promote_types(made.dtype, jnp.float32))


def own_loss(
    model: OwnModel,
    parts: OwnParts,
    last: Parameters,
    x: jax.Array,
    batch: dict[str, jax.Array],
    parallelism: Parallelism,
) -> jax.Array:
    """Sum the masked next-token losses of the stream `x` [B, S, H]: [], in at least float32.

    Tokens go through the head in chunks; the backward computes each chunk's logits again. Ranks
    that share a sequence's positions add theirs.
    """
    targets, mask = (
        stream_positions(batch[name], parallelism, dim=1) for name in ("targets", "loss_mask")
    )
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
    total = lax.scan(add, zero, chunks, unroll=len(chunks[1]) == 1)[0]
    shared = parallelism.sequence and parallelism.tensor > 1
    return lax.psum(total, "tensor") if shared else total


def tables_of_own_head(embedding: Parameters, parts: OwnParts) -> Parameters:
    """Return the parameters of the embedding that the head is tied to."""
    tied = {tuple(map(str, path)) for path in parts.head.tied.values()}
    leaves = traverse_util.flatten_dict(embedding)
    return traverse_util.unflatten_dict({path: leaves[path] for path in leaves if path in tied})


def read_by_own_head(parameters: Parameters, parts: OwnParts) -> Parameters:
    """Return the part of the parameters that the head reads: its own, and those it is tied to."""
    read: Parameters = {"head": parameters["head"]}
    if parts.head.tied:
        read["embedding"] = tables_of_own_head(parameters["embedding"], parts)
    return read


def _stream_and_balance(part: Part, made: Any, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Check what a block returned; the stream goes on in the dtype of `x`."""
    stream, balance = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if getattr(stream, "shape", None) != x.shape:
        shape = getattr(stream, "shape", type(stream).__name__)
        raise UserError(f"{part.kind} maps the stream {x.shape} to {shape}; it must keep the shape")
    if balance is not None and getattr(balance, "shape", None) != x.shape[:1]:
        shape = getattr(balance, "shape", type(balance).__name__)
        raise UserError(
            f"{part.kind} returns a balance loss {shape}; one number for each of {x.shape[0]} "
            "sequences would do"
        )
    return stream.astype(x.dtype), balance
