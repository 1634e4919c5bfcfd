"""Which experts a token goes to, and with what weight."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.config import ModelConfig


class Routing(NamedTuple):
    """What the router says of each token, for k experts a token out of E."""

    experts: jax.Array
    """int32 [rows, columns, k], best first; E stands for none."""
    gates: jax.Array
    """[rows, columns, k] in at least float32, what each expert's output is multiplied by."""
    probabilities: jax.Array
    """[rows, columns, E] in at least float32, the softmax over all experts."""


def route(kernel: jax.Array, x: jax.Array, config: ModelConfig) -> Routing:
    """The k experts with the largest logits, of equal ones those with the lower numbers.

    Logits and softmax are in at least float32, whatever the dtype of `x` and `kernel`. With
    `normalised_gates` the gates of a token are the softmax over its k logits (Jiang et al. 2024,
    "Mixtral of Experts", section 2.1), else its k largest probabilities (Dai et al. 2024,
    "DeepSeekMoE", equations 3 to 5).

    Args:
        kernel: [hidden, E].
        x: [rows, columns, hidden], after the norm.
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
    """int32 [..., count]: the places of the largest logits, each maximum the first of its equals.

    (`lax.top_k` does not promise an order of equals on every platform.)
    """
    places = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    found = []
    for _ in range(count):
        best = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
        found.append(best)
        logits = jnp.where(places == best, -jnp.inf, logits)
    return jnp.concatenate(found, axis=-1)
