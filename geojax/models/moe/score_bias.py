"""Balance of experts without a loss: the bias of the router's scores, and what moves it.

A bias that grows while an expert gets too few tokens keeps all experts busy and adds nothing to the
gradients of the weights (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for
Mixture-of-Experts", algorithm 1; "DeepSeek-V3", 2024, section 2.1.2). The loss does not depend on
it smoothly, so it has no gradient; in the place of one comes the *excess* of each expert's choices,
which sums over microbatches, ranks, stages and sites exactly where gradients do. The optimizer
moves the bias against its sign (`geojax.optim.optimizer`).

Shapes: B batch, S sequence, E experts, k experts of a token.
"""

import jax
import jax.numpy as jnp

from geojax.collectives.axes import vary_over, varying_axes
from geojax.models.moe.grouped_matmul import count_each


def with_excess(gates: jax.Array, bias: jax.Array, experts: jax.Array) -> jax.Array:
    """Return `gates`, and let the backward pass give `bias` the excess of its experts' choices.

    The excess of expert e is E times its choices less those of all experts together: an integer,
    positive where the expert has more than its share.

    Args:
        gates: [B, S, k], through which the loss depends on the layer.
        bias: [E].
        experts: int32 [B, S, k], the choices of this rank's positions; E stands for none.
    """
    count = len(bias)
    chosen = count_each(experts.reshape(-1), count)
    excess = (count * chosen - chosen.sum()).astype(bias.dtype)
    axes = varying_axes(gates, bias, excess)
    return _with_excess(*vary_over((gates, bias, excess), axes))


@jax.custom_vjp
def _with_excess(gates: jax.Array, bias: jax.Array, excess: jax.Array) -> jax.Array:
    return gates


_with_excess.defvjp(
    lambda gates, bias, excess: (gates, excess),
    lambda excess, cotangent: (cotangent, excess, jnp.zeros_like(excess)),
)
