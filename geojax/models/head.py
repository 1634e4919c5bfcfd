"""The head: the final norm, logits of the vocabulary, and the loss.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

import jax
import jax.numpy as jnp

from geojax.models.config import ModelConfig
from geojax.models.cross_entropy import cross_entropy_sum, soft_cap
from geojax.models.norm import norm
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.tensor import copy_to_tp_region
from geojax.models.parameters import Parameters


def token_loss(
    parameters: Parameters,
    normed: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> jax.Array:
    """Sum the masked losses of predicting `targets` from the stream `normed` by the final norm.

    Of `parameters` it reads the kernel of the head. The sum is over the positions of the batch, the
    same on all ranks of `tensor`.
    """
    return cross_entropy_sum(
        copy_to_tp_region(normed, parallelism),
        head_kernel(parameters, config),
        targets,
        mask,
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
