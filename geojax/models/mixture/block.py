"""A mixture of experts in the place of a layer's feed-forward block.

    stream ─► norm ─┬─► router ─► experts and gates of each token ─► balance loss
                    ├─► experts that the tokens go to, times their gates ─┬─► what the block adds
                    └─► shared experts, which all tokens go to ───────────┘

Every choice is made in the norm's output of the rank that holds the token, so that the router, the
drops and the balance loss are the same on every layout.
"""

import jax
import jax.numpy as jnp

from geojax.errors import UserError
from geojax.models.config import ModelConfig
from geojax.models.feed_forward import activated, linear
from geojax.models.mixture.balance import balance_loss
from geojax.models.mixture.capacity import drop
from geojax.models.mixture.experts import apply_experts
from geojax.models.mixture.router import Routing, route
from geojax.models.norm import norm
from geojax.models.parallelism import ALONE, Parallelism
from geojax.models.parameters import Parameters
from geojax.models.tensor_parallel import enter, leave


def mixture_block(
    parameters: Parameters,
    x: jax.Array,
    segment_ids: jax.Array | None,
    columns: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism = ALONE,
) -> tuple[jax.Array, jax.Array]:
    """What the mixture adds to the stream `x` [rows, columns, hidden], and its balance loss.

    Padding goes to no expert but the shared ones, and takes no expert's room.

    Args:
        parameters: a layer's: the block reads its feed_forward_norm, router, experts and
            shared_experts.
        x: the residual stream.
        segment_ids: int32 [rows, columns] of the stream's columns, 0 for padding; None: none is.
        columns: int32 [columns], the positions in the row of the stream's columns.
        config: the model.
        parallelism: how model and rows are spread; `parameters` are this rank's parts.

    Returns:
        [rows, columns, hidden] in the dtype of `x`, and [rows] (see `balance_loss`).
    """
    settings = config.mixture
    assert settings is not None, "the model has no mixture"
    normed = norm(parameters["feed_forward_norm"], x, config)
    routing = route(parameters["router"]["kernel"], normed, settings)
    real = None if segment_ids is None else segment_ids != 0
    balance = balance_loss(routing, real, parallelism)
    experts = routing.experts
    if real is not None:
        experts = jnp.where(real[..., None], experts, settings.experts)
    experts = drop(experts, columns, settings, parallelism)
    routing = routing._replace(experts=experts)
    return _apply(parameters, normed, routing, config, parallelism), balance


def _apply(
    parameters: Parameters,
    normed: jax.Array,
    routing: Routing,
    config: ModelConfig,
    parallelism: Parallelism,
) -> jax.Array:
    """The routed experts and the shared ones, [rows, columns, hidden]."""
    if parallelism.expert > 1:
        raise UserError("mixture: expert parallelism is not there yet")
    x, experts, gates = (
        enter(each, parallelism) for each in (normed, routing.experts, routing.gates)
    )
    tokens = x.reshape(-1, x.shape[-1])
    choices = experts.shape[-1]
    routed = apply_experts(
        parameters["experts"],
        tokens,
        experts.reshape(-1, choices),
        gates.reshape(-1, choices),
        config,
    ).reshape(x.shape)
    if "shared_experts" in parameters:
        own = parameters["shared_experts"]
        routed += linear(own["down"], activated(own, x, config))
    return leave(routed.astype(x.dtype), parallelism)
