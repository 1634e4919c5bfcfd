"""The whole model: embedding, scanned layers, head; logits and loss.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from geojax.errors import UserError
from geojax.models.chunk.chunk import Chunk, ModelFunctions
from geojax.models.chunk.layer_io import layer_slice
from geojax.models.chunk.layer_scan import Layers, Span
from geojax.models.chunk.remat import Remat, rematerialize
from geojax.models.config import ModelConfig
from geojax.models.cross_entropy import cross_entropy_sum, soft_cap
from geojax.models.dropout import dropout
from geojax.models.embedding import look_up, vocab_parallel_embedding
from geojax.models.frozen import unmarked
from geojax.models.layers import LayerContext, layer, make_context
from geojax.models.moe import weighted_aux_loss
from geojax.models.norm import norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.sequence_order import local_positions
from geojax.models.parallel.tensor import copy_to_tp_region, reduce_from_tp_region, stream_positions
from geojax.models.parameters import Parameters
from geojax.precision import NO_FP8, LinearMatmul

Batch = dict[str, jax.Array]
"""Arrays of a batch: tokens, targets, segment_ids, positions int32 [B, S]; loss_mask [B, S];
row int32 [B]. S is the whole sequence or this rank's share of it (see
`geojax.models.parallel.sequence_order`)."""


def loss_sum(
    parameters: Parameters,
    batch: Batch,
    config: ModelConfig,
    *,
    dropout_key: jax.Array | None = None,
    attention: str = "auto",
    remat: Remat = "none",
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> tuple[jax.Array, jax.Array]:
    """Sum the masked next-token losses; returns that sum and the sum of the mask.

    Both sums are scalars of at least float32: their ratio over all sequences of all devices is the
    loss. The former includes the experts' load-balancing losses, each sequence's times its number
    of targets. It computes in the dtype of `parameters`, but norms, softmax and cross-entropy in at
    least float32. It may be called inside a `shard_map`; sequences are independent of each other.

    Args:
        parameters: the tree of `parameter_shapes`.
        batch: see `Batch`.
        config: the model.
        dropout_key: a JAX key that holds seed and step; None: no dropout.
        attention: an implementation that `geojax.models.attention` knows.
        remat: see `geojax.models.chunk.remat`.
        parallelism: how model and sequences are sharded over the ranks of the surrounding
            `shard_map`; `parameters` and `batch` are this rank's shards.
        matmul: matmul of the linear layers; embedding, router and head always multiply in the
            compute dtype.

    Raises:
        UserError: the sequence is longer than learned positions reach, or `remat` is unknown.
    """
    x, aux_loss = stream(
        parameters,
        batch,
        config,
        dropout_key=dropout_key,
        attention=attention,
        remat=remat,
        parallelism=parallelism,
        matmul=matmul,
    )
    total = head_loss(parameters, x, batch, config, parallelism)
    if aux_loss is not None and config.is_moe:
        total += weighted_aux_loss(aux_loss, batch["loss_mask"])
    return total, batch["loss_mask"].astype(total.dtype).sum()


def logits(
    parameters: Parameters,
    batch: Batch,
    config: ModelConfig,
    *,
    dropout_key: jax.Array | None = None,
    attention: str = "auto",
    remat: Remat = "none",
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> jax.Array:
    """Compute the logits of every position, [B, S, V], in at least float32.

    Arguments and errors are those of `loss_sum`; targets and loss_mask are not read. With tensor
    parallelism see `head`.
    """
    x, _ = stream(
        parameters,
        batch,
        config,
        dropout_key=dropout_key,
        attention=attention,
        remat=remat,
        parallelism=parallelism,
        matmul=matmul,
    )
    return head(parameters, x, config, parallelism)


def stream(
    parameters: Parameters,
    batch: Batch,
    config: ModelConfig,
    *,
    dropout_key: jax.Array | None,
    attention: str,
    remat: Remat,
    parallelism: Parallelism,
    matmul: LinearMatmul,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the stream after all layers, and the sum of their balance losses (see `layer`)."""
    chunk = model_chunk(
        config,
        range(config.num_stacked_layers),
        parameters["embedding"]["tokens"]["embedding"].dtype,
        dropout_key=dropout_key,
        attention=attention,
        remat=remat,
        parallelism=parallelism,
        matmul=matmul,
    )
    chunk = dataclasses.replace(chunk, is_last=False)
    weights = chunk.stacked_weights(parameters["embedding"], parameters["layers"], {})
    return chunk.forward_only(weights, None, batch, chunk.functions.context(batch))


def model_chunk(
    config: ModelConfig,
    layers: range,
    dtype: jnp.dtype,
    *,
    dropout_key: jax.Array | None,
    attention: str,
    remat: Remat,
    parallelism: Parallelism,
    matmul: LinearMatmul,
) -> Chunk:
    """Return the chunk of consecutive stacked `layers`; those that multiply alike are one span.

    It has the embedding and the first dense layers if it begins with the first stacked one, and the
    head if it ends with the last one. Its `functions` are those of the whole model; the layers
    compute in `dtype`. The other arguments are those of `loss_sum`.
    """
    count = config.num_stacked_layers

    def span_layer(
        own: LinearMatmul,
        weights: Parameters,
        x: jax.Array,
        index: jax.Array,
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array | None]:
        number = config.first_k_dense_replace + index
        return layer(unmarked(weights), x, number, context, config, attention, parallelism, own)

    def any_layer(
        weights: Parameters, x: jax.Array, index: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array | None]:
        return span_layer(matmul.at_layer(index, count), weights, x, index, context)

    def dense_layer(
        number: int, context: LayerContext, stacked: Parameters, x: jax.Array
    ) -> jax.Array:
        own = layer_slice(stacked, number)
        return layer(own, x, jnp.int32(number), context, config, attention, parallelism)[0]

    def first_stream(first: Parameters, batch: Batch) -> jax.Array:
        first = unmarked(first)
        x = embed(first, batch, config, dropout_key, parallelism)
        if not config.first_k_dense_replace:
            return x
        context = make_context(batch, config, dtype, dropout_key, parallelism)
        for number in range(config.first_k_dense_replace):
            # Each keeps its input alone; a pipeline would compute it again in any case.
            dense = jax.checkpoint(functools.partial(dense_layer, number, context))
            x = dense(first["dense_layers"], x)
        return x

    def balance(losses: jax.Array, batch: Batch) -> jax.Array:
        return weighted_aux_loss(losses, batch["loss_mask"])

    functions = ModelFunctions(
        embed=first_stream,
        layer=rematerialize(any_layer, remat),
        head=lambda last, x, batch: head_loss(unmarked(last), x, batch, config, parallelism),
        context=lambda batch: make_context(batch, config, dtype, dropout_key, parallelism),
        balance=balance if config.is_moe else None,
    )
    spans = [
        Span(len(part), rematerialize(functools.partial(span_layer, own), remat))
        for part, own in matmul.spans_within(layers, count)
    ]
    is_first, is_last = layers.start == 0, layers.stop == count
    return Chunk(functions, Layers(tuple(spans), layers.start), is_first, is_last)


def embed(
    parameters: Parameters,
    batch: Batch,
    config: ModelConfig,
    dropout_key: jax.Array | None,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> jax.Array:
    """Embed the tokens as the first residual stream, [B, S, H].

    `parameters` are the tables of "embedding". With sequence parallelism the stream has 1 / tensor
    of the positions, here and through all layers.
    """
    tokens = vocab_parallel_embedding(
        parameters["tokens"]["embedding"], batch["tokens"], parallelism
    )
    x = reduce_from_tp_region(tokens, parallelism)
    if config.scale_embeddings:
        x = x * jnp.asarray(math.sqrt(config.hidden_size), x.dtype)
    if config.position_embedding_type == "learned_absolute":
        sequence = batch["tokens"].shape[1] * parallelism.context
        if sequence > config.max_position_embeddings:
            raise UserError(
                f"a sequence of {sequence} tokens is longer than the model's "
                f"{config.max_position_embeddings} learned positions (max_position_embeddings)"
            )
        positions = stream_positions(batch["positions"], parallelism, dim=1)
        x = x + look_up(parameters["positions"]["embedding"], positions)
    if dropout_key is not None and config.dropout > 0:
        columns = local_positions(batch["tokens"].shape[1], parallelism)
        columns = stream_positions(columns, parallelism, dim=0)
        x = dropout(x, jax.random.fold_in(dropout_key, 0), batch["row"], columns, config.dropout)
    return x


def head_loss(
    parameters: Parameters,
    x: jax.Array,
    batch: Batch,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> jax.Array:
    """Sum the masked next-token losses of the stream `x` after all layers.

    Of `parameters` it reads the final norm and the kernel of the head. The sum is over the
    positions of the batch, the same on all ranks of `tensor`.
    """
    return cross_entropy_sum(
        copy_to_tp_region(norm(parameters["final_norm"], x, config), parallelism),
        head_kernel(parameters, config),
        batch["targets"],
        batch["loss_mask"],
        tied=config.tie_word_embeddings,
        vocabulary=config.vocab_size,
        softcap=config.final_logit_softcapping,
        z_loss=config.z_loss_coef,
        parallelism=parallelism,
    )


def head_kernel(parameters: Parameters, config: ModelConfig) -> jax.Array:
    """Return the head's kernel [H, V], or the embedding [V, H] where the head is tied."""
    if config.tie_word_embeddings:
        return parameters["embedding"]["tokens"]["embedding"]
    return parameters["head"]["kernel"]


def head(
    parameters: Parameters,
    x: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> jax.Array:
    """Compute logits [B, S, V], in at least float32, of the stream `x` after all layers.

    With tensor parallelism they are this rank's part of the vocabulary, of all positions; padding
    of the vocabulary to a multiple of `tensor` comes last.
    """
    hidden = copy_to_tp_region(norm(parameters["final_norm"], x, config), parallelism)
    kernel = head_kernel(parameters, config)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    equation = "...d,vd->...v" if config.tie_word_embeddings else "...d,dv->...v"
    return soft_cap(
        jnp.einsum(equation, hidden, kernel, preferred_element_type=wide),
        config.final_logit_softcapping,
    )
