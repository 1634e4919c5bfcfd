"""The whole model: embedding, scanned layers, head; logits and loss.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

import dataclasses
import functools
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp

from geojax.errors import UserError
from geojax.models.chunk.chunk import Chunk, ModelFunctions
from geojax.models.chunk.layer_io import layer_slice
from geojax.models.chunk.layer_scan import Layers, LayerSpan
from geojax.models.chunk.remat import Remat, computed_again, rematerialize
from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters
from geojax.models.dropout import dropout
from geojax.models.embedding import embed_tokens, look_up
from geojax.models.frozen import unmarked
from geojax.models.head import head, token_loss
from geojax.models.layers import LayerContext, layer, make_context
from geojax.models.moe import weighted_aux_loss
from geojax.models.multi_token_prediction import mtp_loss
from geojax.models.norm import norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.sequence_order import local_positions
from geojax.models.parallel.tensor import stream_positions
from geojax.precision import NO_FP8, LinearMatmul

Batch = dict[str, jax.Array]
"""Arrays of a batch: tokens, targets, segment_ids, positions int32 [B, S]; loss_mask [B, S];
row int32 [B]. S is the whole sequence or this rank's share of it (see
`geojax.models.parallel.sequence_order`)."""


class ModelOptions(TypedDict, total=False):
    """The choices of how a model is computed, by keyword."""

    dropout_key: jax.Array | None
    """A JAX key that holds seed and step; default None: no dropout."""
    attention: str
    """An implementation that `geojax.models.attention` knows; default "auto"."""
    remat: Remat
    """See `geojax.models.chunk.remat`; default "none"."""
    parallelism: Parallelism
    """The sharding of model and sequences over the ranks of the surrounding `shard_map`, whose
    shards parameters and batch are; default: one device."""
    matmul: LinearMatmul
    """Matmul of the linear layers; embedding, router and head always multiply in the compute dtype.
    Default: no FP8."""


def loss_sum(
    parameters: Parameters, batch: Batch, config: ModelConfig, **options: Unpack[ModelOptions]
) -> tuple[jax.Array, jax.Array]:
    """Sum the masked next-token losses; returns that sum and the sum of the mask.

    Both sums are scalars of at least float32: their ratio over all sequences of all devices is the
    loss. The former includes the experts' load-balancing losses, each sequence's times its number
    of targets, and the losses of modules that predict later tokens. It computes in the dtype of
    `parameters`, but norms, softmax and cross-entropy in at least float32. It may be called inside
    a `shard_map`; sequences are independent of each other.

    Args:
        parameters: the tree of `parameter_shapes`.
        batch: see `Batch`.
        config: the model.
        options: see `ModelOptions`.

    Raises:
        UserError: the sequence is longer than learned positions reach, or `remat` is unknown.
    """
    x, aux_loss = stream(parameters, batch, config, **options)
    parallelism = options.get("parallelism", SINGLE_DEVICE)
    key, kernel = options.get("dropout_key"), options.get("attention", "auto")
    total = head_losses(
        parameters, x, batch, config, parallelism, dropout_key=key, attention=kernel
    ).sum()
    if aux_loss is not None and config.is_moe:
        total += weighted_aux_loss(aux_loss, batch["loss_mask"])
    return total, batch["loss_mask"].astype(total.dtype).sum()


def logits(
    parameters: Parameters, batch: Batch, config: ModelConfig, **options: Unpack[ModelOptions]
) -> jax.Array:
    """Compute the logits of every position, [B, S, V], in at least float32.

    Arguments and errors are those of `loss_sum`; targets and loss_mask are not read. With tensor
    parallelism see `head`.
    """
    x, _ = stream(parameters, batch, config, **options)
    return head(parameters, x, config, options.get("parallelism", SINGLE_DEVICE))


def stream(
    parameters: Parameters,
    batch: Batch,
    config: ModelConfig,
    *,
    dropout_key: jax.Array | None = None,
    attention: str = "auto",
    remat: Remat = "none",
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
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
            dense = computed_again(functools.partial(dense_layer, number))
            x = dense(context, first["dense_layers"], x)
        return x

    def balance(losses: jax.Array, batch: Batch) -> jax.Array:
        return weighted_aux_loss(losses, batch["loss_mask"])

    functions = ModelFunctions(
        embed=first_stream,
        layer=rematerialize(any_layer, remat),
        head=lambda last, x, batch: head_losses(
            unmarked(last),
            x,
            batch,
            config,
            parallelism,
            dropout_key=dropout_key,
            attention=attention,
        ),
        context=lambda batch: make_context(batch, config, dtype, dropout_key, parallelism),
        balance=balance if config.is_moe else None,
    )
    spans = [
        LayerSpan(len(part), rematerialize(functools.partial(span_layer, own), remat))
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
    x = embed_tokens(parameters["tokens"]["embedding"], batch["tokens"], config, parallelism)
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


def head_losses(
    parameters: Parameters,
    x: jax.Array,
    batch: Batch,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    *,
    dropout_key: jax.Array | None = None,
    attention: str = "auto",
) -> jax.Array:
    """Sum the masked losses of the stream `x` after all layers.

    Of `parameters` it reads what `read_by_head` names.

    Returns:
        The sum of the next-token losses, []; with modules for later tokens [2], that sum and their
        share, which together are what is trained.
    """
    normed = norm(parameters["final_norm"], x, config)
    loss = token_loss(parameters, normed, batch["targets"], batch["loss_mask"], config, parallelism)
    if not config.num_nextn_predict_layers:
        return loss

    def run_layer(
        weights: Parameters, x: jax.Array, index: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array | None]:
        return layer(weights, x, index, context, config, attention, parallelism)

    context = make_context(batch, config, x.dtype, dropout_key, parallelism)
    later = mtp_loss(parameters, normed, batch, context, config, parallelism, run_layer)
    return jnp.stack([loss, later])


def read_by_head(parameters: Parameters, config: ModelConfig) -> Parameters:
    """Return the part of the parameters that `head_losses` reads."""
    names = ["final_norm"]
    if not config.tie_word_embeddings:
        names.append("head")
    if config.num_nextn_predict_layers:
        names.append("mtp")
    read = {name: parameters[name] for name in names}
    if config.head_reads_tokens:
        read["embedding"] = {"tokens": parameters["embedding"]["tokens"]}
    return read
