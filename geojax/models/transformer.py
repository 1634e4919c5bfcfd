"""The whole model: embedding, scanned layers, head; logits and loss."""

import jax
import jax.numpy as jnp
from jax import lax

from geojax.errors import UserError
from geojax.models.config import ModelConfig
from geojax.models.cross_entropy import cross_entropy_sum
from geojax.models.dropout import dropout
from geojax.models.embedding import look_up
from geojax.models.layers import Context, layer, make_context
from geojax.models.norm import norm
from geojax.models.parameters import Parameters
from geojax.models.remat import Remat, rematerialised
from geojax.models.varying import vary_over, varying_axes

Batch = dict[str, jax.Array]
"""tokens, targets, segment_ids, positions int32 [rows, sequence]; loss_mask [rows, sequence];
row int32 [rows]."""


def loss_sum(
    parameters: Parameters,
    batch: Batch,
    config: ModelConfig,
    *,
    dropout_key: jax.Array | None = None,
    attention: str = "auto",
    remat: Remat = "none",
) -> tuple[jax.Array, jax.Array]:
    """The masked sum of the next-token losses, and the sum of the mask.

    Both sums are scalars of at least float32: their ratio over all rows of all devices is the loss.
    Computes in the dtype of `parameters`, but norms, softmax and cross-entropy in at least float32.
    May be called inside a `shard_map`; rows are independent of each other.

    Args:
        parameters: the tree of `parameter_shapes`.
        batch: see `Batch`.
        config: the model.
        dropout_key: a JAX key that holds seed and step; None: no dropout.
        attention: an implementation that `geojax.models.attention` knows.
        remat: see `geojax.models.remat`.

    Raises:
        UserError: the sequence is longer than learned positions reach, or `remat` is unknown.
    """
    x = stream(parameters, batch, config, dropout_key=dropout_key, attention=attention, remat=remat)
    mask = batch["loss_mask"].astype(jnp.promote_types(x.dtype, jnp.float32))
    return head_loss(parameters, x, batch, config), mask.sum()


def logits(
    parameters: Parameters,
    batch: Batch,
    config: ModelConfig,
    *,
    dropout_key: jax.Array | None = None,
    attention: str = "auto",
    remat: Remat = "none",
) -> jax.Array:
    """The logits of every position, [rows, sequence, vocabulary], in at least float32.

    Arguments and errors are those of `loss_sum`; targets and loss_mask are not read.
    """
    x = stream(parameters, batch, config, dropout_key=dropout_key, attention=attention, remat=remat)
    return head(parameters, norm(parameters["final_norm"], x, config), config)


def stream(
    parameters: Parameters,
    batch: Batch,
    config: ModelConfig,
    *,
    dropout_key: jax.Array | None,
    attention: str,
    remat: Remat,
) -> jax.Array:
    """The residual stream after all layers, [rows, sequence, hidden]."""
    x = embed(parameters["embedding"], batch, config, dropout_key)
    context = make_context(batch, config, x.dtype, dropout_key)
    return apply_layers(parameters["layers"], x, context, config, attention=attention, remat=remat)


def embed(
    parameters: Parameters, batch: Batch, config: ModelConfig, dropout_key: jax.Array | None
) -> jax.Array:
    """The first residual stream, [rows, sequence, hidden]."""
    x = look_up(parameters["tokens"]["embedding"], batch["tokens"])
    if config.positions == "learned":
        sequence = batch["tokens"].shape[1]
        if sequence > config.maximum_positions:
            raise UserError(
                f"a sequence of {sequence} tokens is longer than the model's "
                f"{config.maximum_positions} learned positions (maximum_positions)"
            )
        x = x + look_up(parameters["positions"]["embedding"], batch["positions"])
    if dropout_key is not None and config.dropout > 0:
        x = dropout(x, jax.random.fold_in(dropout_key, 0), batch["row"], config.dropout)
    return x


def apply_layers(
    layers: Parameters,
    x: jax.Array,
    context: Context,
    config: ModelConfig,
    *,
    attention: str = "auto",
    remat: Remat = "none",
    first_layer: jax.Array | int = 0,
) -> jax.Array:
    """`x` [rows, sequence, hidden] through the stacked `layers`, whichever part of them is given.

    `first_layer` is the number, in the whole model, of the first layer given.
    """
    count = jax.tree.leaves(layers)[0].shape[0]
    indices = first_layer + jnp.arange(count, dtype=jnp.int32)

    def body(x: jax.Array, layer_and_index: tuple[Parameters, jax.Array]) -> tuple[jax.Array, None]:
        own, index = layer_and_index
        return layer(own, x, index, context, config, attention), None

    # The carry must vary over whatever the weights or the batch vary over.
    x = vary_over(x, varying_axes(layers, x, context, indices))
    return lax.scan(rematerialised(body, remat), x, (layers, indices))[0]


def head_loss(parameters: Parameters, x: jax.Array, batch: Batch, config: ModelConfig) -> jax.Array:
    """The masked sum of the next-token losses, from the stream `x` after all layers.

    Reads of `parameters` the final norm and the kernel of the head.
    """
    hidden = norm(parameters["final_norm"], x, config)
    mask = batch["loss_mask"].astype(jnp.promote_types(x.dtype, jnp.float32))
    kernel = head_kernel(parameters, config)
    return cross_entropy_sum(hidden, kernel, batch["targets"], mask, tied=config.tied_head)


def head_kernel(parameters: Parameters, config: ModelConfig) -> jax.Array:
    """[hidden, vocabulary], or the embedding [vocabulary, hidden] where the head is tied."""
    if config.tied_head:
        return parameters["embedding"]["tokens"]["embedding"]
    return parameters["head"]["kernel"]


def head(parameters: Parameters, hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """Logits [..., vocabulary] in at least float32 of `hidden` [..., hidden]."""
    kernel = head_kernel(parameters, config)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    equation = "...d,vd->...v" if config.tied_head else "...d,dv->...v"
    return jnp.einsum(equation, hidden, kernel, preferred_element_type=wide)
