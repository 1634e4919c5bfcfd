"""The whole model: embedding, scanned layers, head; logits and loss.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

import dataclasses
import functools
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from geojax.models.block import Block, block_of
from geojax.models.chunk.chunk import Chunk, ModelFunctions
from geojax.models.chunk.layer_io import layer_slice
from geojax.models.chunk.layer_scan import Layer, Layers, LayerSpan
from geojax.models.chunk.remat import Remat, computed_again, rematerialize
from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings, LayerContext, make_context
from geojax.models.declaration import Parameters
from geojax.models.embedding import DENSE_LAYERS, TOKENS, Embedding, dense_layers_of, tables_of
from geojax.models.frozen import split_trained, unmarked
from geojax.models.head import Head
from geojax.models.layers import Norm
from geojax.models.lora import scale_adapters
from geojax.models.moe import weighted_aux_loss
from geojax.models.multi_token_prediction import mtp_loss
from geojax.models.own.chunk import own_chunk, own_logits, read_by_own_head, tables_of_own_head
from geojax.models.own.parts import own_parts
from geojax.models.own.settings import AnyModel, OwnModel
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.shares import share_of_targets
from geojax.precision import NO_FP8, LinearMatmul, accumulate

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
    parameters: Parameters, batch: Batch, config: AnyModel, **options: Unpack[ModelOptions]
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
    functions = _whole(parameters, config, options).functions
    total = functions.head(read_by_head(parameters, config), x, batch).sum()
    if aux_loss is not None and config.is_moe:
        total += weighted_aux_loss(aux_loss, batch["loss_mask"])
    return total, batch["loss_mask"].astype(total.dtype).sum()


def logits(
    parameters: Parameters, batch: Batch, config: AnyModel, **options: Unpack[ModelOptions]
) -> jax.Array:
    """Compute the logits of every position, [B, S, V], in at least float32.

    Arguments and errors are those of `loss_sum`; targets and loss_mask are not read. With tensor
    parallelism see `head`.
    """
    x, _ = stream(parameters, batch, config, **options)
    if isinstance(config, OwnModel):
        return own_logits(own_parts(config), read_by_head(parameters, config), x)
    return Head.of(parameters, config, _compute(options))(final_norm(parameters, config)(x))


def stream(
    parameters: Parameters, batch: Batch, config: AnyModel, **options: Unpack[ModelOptions]
) -> tuple[jax.Array, jax.Array | None]:
    """Return the stream after all layers, and the sum of their balance losses (see `Block`)."""
    chunk = dataclasses.replace(_whole(parameters, config, options), is_last=False)
    weights = chunk.stacked_weights(parameters["embedding"], parameters["layers"], {})
    return chunk.forward_only(weights, None, batch, chunk.functions.context(batch))


def _whole(parameters: Parameters, config: AnyModel, options: ModelOptions) -> Chunk:
    return model_chunk(
        config,
        range(config.num_stacked_layers),
        jax.tree.leaves(parameters["embedding"])[0].dtype,
        _compute(options),
        dropout_key=options.get("dropout_key"),
        remat=options.get("remat", "none"),
    )


def _compute(options: ModelOptions) -> ComputeSettings:
    return ComputeSettings(
        options.get("parallelism", SINGLE_DEVICE),
        options.get("matmul", NO_FP8),
        options.get("attention", "auto"),
    )


def model_chunk(
    config: AnyModel,
    layers: range,
    dtype: jnp.dtype,
    compute: ComputeSettings,
    *,
    dropout_key: jax.Array | None,
    remat: Remat,
) -> Chunk:
    """Return the chunk of consecutive stacked `layers`; those that multiply alike are one span.

    It has the embedding and the first dense layers if it begins with the first stacked one, and the
    head if it ends with the last one. Its `functions` are those of the whole model; the layers
    compute in `dtype`, as `compute` says. The other arguments are those of `loss_sum`.
    """
    compute = dataclasses.replace(compute, gathers_again=remat == "selective")
    if isinstance(config, OwnModel):
        return own_chunk(config, layers, dtype, compute, dropout_key=dropout_key, remat=remat)
    count, matmul = config.num_stacked_layers, compute.matmul

    def apply(
        block: Block, weights: Parameters, x: jax.Array, number: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array | None]:
        if config.lora is not None:
            weights = scale_adapters(weights, config.lora)
        return nnx.merge(nnx.graphdef(block), weights)(x, context._replace(layer=number))

    def layer_with(own: LinearMatmul, *, of_any_number: bool = False) -> Layer:
        block = block_of(
            config, dataclasses.replace(compute, matmul=own), with_experts=config.is_moe
        )

        def layer(
            weights: Parameters, x: jax.Array, index: jax.Array, context: LayerContext
        ) -> tuple[jax.Array, jax.Array | None]:
            if of_any_number:
                follows = own.at_layer(index, count).quantized
                context = context._replace(follows_recipe=follows)
            number = config.first_k_dense_replace + index
            return apply(block, unmarked(weights), x, number, context)

        return rematerialize(layer, remat)

    dense = block_of(config, compute.without_fp8, with_experts=False)

    def dense_layer(
        number: int, context: LayerContext, stacked: Parameters, x: jax.Array
    ) -> jax.Array:
        return apply(dense, layer_slice(stacked, number), x, jnp.int32(number), context)[0]

    def first_stream(first: Parameters, batch: Batch, sums: Parameters | None = None) -> jax.Array:
        first = unmarked(first)
        embedding = nnx.graphdef(Embedding(config, compute))
        x = nnx.merge(embedding, tables_of(first))(batch, dropout_key, sums)
        if not config.first_k_dense_replace:
            return x
        context = make_context(batch, config, dtype, dropout_key, compute.parallelism)
        for number in range(config.first_k_dense_replace):
            # Each keeps its input alone; a pipeline would compute it again in any case.
            x = computed_again(functools.partial(dense_layer, number))(
                context, dense_layers_of(first), x
            )
        return x

    def embed_sums(
        first: Parameters, batch: Batch, cotangent: jax.Array, sums: Parameters
    ) -> Parameters:
        split = split_trained(first)
        _, backward = jax.vjp(
            lambda own, tables: first_stream(split.merge(own), batch, tables),
            split.trained,
            tables_of(sums),
        )
        gradients, tables = backward(cotangent)
        dense = accumulate(dense_layers_of(sums), dense_layers_of(gradients))
        return {**tables, **({DENSE_LAYERS: dense} if dense else {})}

    def balance(losses: jax.Array, batch: Batch) -> jax.Array:
        return weighted_aux_loss(losses, batch["loss_mask"])

    functions = ModelFunctions(
        embed=first_stream,
        embed_sums=embed_sums if config.lora is None else None,
        layer=layer_with(matmul, of_any_number=True),
        head=lambda last, x, batch: head_losses(
            unmarked(last), x, batch, config, compute, dropout_key=dropout_key
        ),
        context=lambda batch: make_context(batch, config, dtype, dropout_key, compute.parallelism),
        balance=balance if config.is_moe else None,
        head_share=None
        if config.num_nextn_predict_layers
        else functools.partial(share_of_targets, parallelism=compute.parallelism),
    )
    spans = [
        LayerSpan(len(part), layer_with(own)) for part, own in matmul.spans_within(layers, count)
    ]
    is_first, is_last = layers.start == 0, layers.stop == count
    return Chunk(functions, Layers(tuple(spans), layers.start), is_first, is_last)


def head_losses(
    parameters: Parameters,
    x: jax.Array,
    batch: Batch,
    config: ModelConfig,
    compute: ComputeSettings = ON_ONE_DEVICE,
    *,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Sum the masked losses of the stream `x` after all layers.

    Of `parameters` it reads what `read_by_head` names.

    Returns:
        The sum of the next-token losses, []; with modules for later tokens [2], that sum and their
        share, which together are what is trained.
    """
    normed = final_norm(parameters, config)(x)
    loss = Head.of(parameters, config, compute).loss(normed, batch["targets"], batch["loss_mask"])
    if not config.num_nextn_predict_layers:
        return loss
    context = make_context(batch, config, x.dtype, dropout_key, compute.parallelism)
    later = mtp_loss(parameters, normed, batch, context, config, compute.without_fp8)
    return jnp.stack([loss, later])


def final_norm(parameters: Parameters, config: ModelConfig) -> Norm:
    """Return the norm of the stream after all layers."""
    return nnx.merge(nnx.graphdef(Norm(config.hidden_size, config)), parameters["final_norm"])


def read_by_head(parameters: Parameters, config: AnyModel) -> Parameters:
    """Return the part of the parameters that the head reads."""
    if isinstance(config, OwnModel):
        return read_by_own_head(parameters, own_parts(config))
    names = ["final_norm"]
    if not config.tie_word_embeddings:
        names.append("head")
    if config.num_nextn_predict_layers:
        names.append("mtp")
    read = {name: parameters[name] for name in names}
    if config.head_reads_tokens:
        read["embedding"] = tables_of_head(parameters["embedding"], config)
    return read


def tables_of_head(embedding: Parameters, config: AnyModel) -> Parameters:
    """Return the part of the embedding's parameters that a head tied to it reads."""
    if isinstance(config, OwnModel):
        return tables_of_own_head(embedding, own_parts(config))
    return {TOKENS: embedding[TOKENS]}
