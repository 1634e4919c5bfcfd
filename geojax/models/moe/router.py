"""Router: the experts of each token and their gates.

Shapes: B batch, S sequence, H hidden, E experts, k experts of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.config import ModelConfig


class Routing(NamedTuple):
    """Routing of each token to k experts out of E."""

    experts: jax.Array
    """int32 [B, S, k], best first; E stands for none."""
    gates: jax.Array
    """[B, S, k] in at least float32, the weights of the experts' outputs."""
    probabilities: jax.Array
    """[B, S, E] in at least float32, the softmax over all experts."""


def route(kernel: jax.Array, x: jax.Array, config: ModelConfig) -> Routing:
    """Choose the k experts with the largest logits, of equal ones those with the lower numbers.

    Logits and softmax are in at least float32, whatever the dtype of `x` and `kernel`. With
    `norm_topk_prob` the gates of a token are the softmax over its k logits (Jiang et al. 2024,
    "Mixtral of Experts", section 2.1), else its k largest probabilities (Dai et al. 2024,
    "DeepSeekMoE", equations 3 to 5).

    Args:
        kernel: [H, E].
        x: [B, S, H], after the norm.
        config: the model.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    # Highest: GPUs otherwise round a float32 product's inputs to 10 bits.
    logits = lax.dot_general(
        x.astype(wide), kernel.astype(wide), dims, precision=lax.Precision.HIGHEST
    )
    experts = _largest(lax.stop_gradient(logits), config.num_experts_per_tok)
    probabilities = jax.nn.softmax(logits, axis=-1)
    if config.norm_topk_prob:
        gates = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
    else:
        gates = jnp.take_along_axis(probabilities, experts, axis=-1)
    return Routing(experts, gates, probabilities)


def _largest(logits: jax.Array, count: int) -> jax.Array:
    """Return the indices of the largest logits, int32 [..., count]; of equals the first.

    (`lax.top_k` does not promise an order of equals on every platform.)
    """
    indices = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    found = []
    for _ in range(count):
        best = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
        found.append(best)
        logits = jnp.where(indices == best, -jnp.inf, logits)
    return jnp.concatenate(found, axis=-1)
