"""Router: the experts of each token and their gates.

Shapes: B batch, S sequence, H hidden, E experts, k experts of a token.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.config import ModelConfig
from geojax.models.declaration import constant, parameter
from geojax.models.layers import Linear

_LEAST_SUM = 1e-20
"""Added to the sum of a token's gates, as in DeepSeek's code."""

SCORE_BIAS = "score_bias"
"""Name of the router's bias, in place of whose gradient comes the excess of its experts' choices
(see `geojax.models.moe.score_bias`); it is no weight that an optimizer trains."""


class Routing(NamedTuple):
    """Routing of each token to k experts out of E."""

    experts: jax.Array
    """int32 [B, S, k], best first; E stands for none."""
    gates: jax.Array
    """[B, S, k] in at least float32, the weights of the experts' outputs."""
    probabilities: jax.Array
    """[B, S, E] in at least float32, the scores of all experts as shares of their sum."""
    log_sums: jax.Array
    """[B, S] in at least float32, the log of the sum of exp(logit) over all experts."""


class Router(Linear):
    """The logits of the experts, and the biases of their choice."""

    def __init__(self, config: ModelConfig):
        super().__init__(
            config.hidden_size, config.num_experts, config, bias=config.moe_bias, fp8=False
        )
        self.config = config
        if config.use_router_bias:
            self.score_bias = parameter((config.num_experts,), constant(0.0), is_wide=True)

    def route(self, x: jax.Array) -> Routing:
        """Choose the k experts with the largest scores, of equal ones those with the lower numbers.

        Logits and scores are in at least float32, whatever the dtype of `x` and the kernel.

        softmax: with `norm_topk_prob` the gates of a token are the softmax over its k logits (Jiang
        et al. 2024, "Mixtral of Experts", section 2.1), else its k largest probabilities (Dai et
        al. 2024, "DeepSeekMoE", equations 3 to 5).

        sigmoid: with `norm_topk_prob` the gates are the k scores as shares of their sum; the choice
        is by scores plus bias, in the best groups alone ("DeepSeek-V3", 2024, equations 12 to 16
        and section 2.1.2).

        Args:
            x: [B, S, H], after the norm.
        """
        config, wide = self.config, jnp.promote_types(x.dtype, jnp.float32)
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        kernel = self.kernel.get_value().astype(wide)
        # Highest: GPUs otherwise round a float32 product's inputs to 10 bits.
        logits = lax.dot_general(x.astype(wide), kernel, dims, precision=lax.Precision.HIGHEST)
        if config.moe_bias:
            logits = logits + self.bias.get_value().astype(wide)
        if config.scoring_func == "sigmoid":
            scores = jax.nn.sigmoid(logits)
            probabilities = scores / scores.sum(axis=-1, keepdims=True)
            experts = self._best(scores)
            gates = jnp.take_along_axis(scores, experts, axis=-1)
            if config.norm_topk_prob:
                gates = gates / (gates.sum(axis=-1, keepdims=True) + _LEAST_SUM)
        else:
            probabilities = jax.nn.softmax(logits, axis=-1)
            # Without a bias logits are in the order of probabilities, never rounded to equals.
            experts = self._best(probabilities if config.use_router_bias else logits)
            if config.norm_topk_prob:
                gates = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
            else:
                gates = jnp.take_along_axis(probabilities, experts, axis=-1)
        if config.routed_scaling_factor != 1:
            gates = config.routed_scaling_factor * gates
        return Routing(experts, gates, probabilities, jax.nn.logsumexp(logits, axis=-1))

    def _best(self, scores: jax.Array) -> jax.Array:
        """Return the experts of each token, int32 [B, S, k], by scores [B, S, E]."""
        config, scores = self.config, lax.stop_gradient(scores)
        if config.use_router_bias:
            bias = self.score_bias.get_value()
            scores = scores + lax.stop_gradient(bias).astype(scores.dtype)
        if config.topk_group < config.n_group:
            of_group = scores.reshape(*scores.shape[:-1], config.n_group, -1)
            two = jnp.take_along_axis(of_group, _largest(of_group, 2), axis=-1).sum(axis=-1)
            groups = _largest(two, config.topk_group)
            is_open = (groups[..., None] == jnp.arange(config.n_group)).any(axis=-2)
            scores = jnp.where(is_open[..., None], of_group, -jnp.inf).reshape(scores.shape)
        return _largest(scores, config.num_experts_per_tok)


def is_score_bias(path: tuple[Any, ...]) -> bool:
    """Return True for the path of a leaf in whose gradient's place there is an experts' excess."""
    return bool(path) and getattr(path[-1], "key", None) == SCORE_BIAS


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
