"""Likelihoods of given text, token by token.

Shapes: B sequences, S positions, V vocabulary.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from geojax.inference.decoder import whole_logits
from geojax.inference.loaded_model import (
    SEQUENCES,
    LoadedModel,
    parallelism_of,
    sharded_program,
)
from geojax.models import AnyModel, Parameters
from geojax.models.transformer import stream
from geojax.precision import NO_FP8

_READ = ("tokens", "targets", "segment_ids", "positions", "row")
_TOKENS_AT_ONCE = 256
"""Tokens whose logits of the whole vocabulary are in memory at once."""


class Scores(NamedTuple):
    """Judgement of each target of a batch."""

    log_likelihood: np.ndarray
    """Natural logarithm of its probability, at least float32 [B, S]."""
    is_likeliest: np.ndarray
    """True where no token is likelier, bool [B, S]."""


class Likelihood(NamedTuple):
    """Likelihood of a text."""

    loss: float
    """Mean negative log-likelihood of a target, in nats."""
    targets: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)


def score(model: LoadedModel, batch: Mapping[str, np.ndarray]) -> Scores:
    """Score the targets of a batch, whose sequences the mesh's ranks can share evenly.

    Args:
        model: the model.
        batch: tokens, targets, segment_ids and positions int32 [B, S], row int32 [B].
    """
    read = {name: batch[name] for name in _READ}
    return Scores(*map(np.asarray, _program(model.config, model.mesh)(model.parameters, read)))


def text_likelihood(model: LoadedModel, batches: Iterable[Mapping[str, np.ndarray]]) -> Likelihood:
    """Return the likelihood of the targets of all batches that their loss_mask counts."""
    total, targets = 0.0, 0
    for batch in batches:
        counts = batch["loss_mask"] > 0
        total -= float(score(model, batch).log_likelihood[counts].sum(dtype=np.float64))
        targets += int(counts.sum())
    return Likelihood(total / max(targets, 1), targets)


@functools.cache
def _program(config: AnyModel, mesh: Mesh) -> Any:
    """Jit `(weights, batch) -> Scores`."""
    parallelism = parallelism_of(mesh)

    def score_shards(parameters: Parameters, batch: dict[str, jax.Array]) -> Any:
        x, _ = stream(
            parameters,
            batch,
            config,
            dropout_key=None,
            attention="auto",
            remat="none",
            parallelism=parallelism,
            matmul=NO_FP8,
        )

        def of_tokens(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, targets = part
            logits = whole_logits(parameters, x, config, parallelism)
            chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
            log_likelihood = chosen - jax.nn.logsumexp(logits, axis=1)
            return log_likelihood, logits.argmax(axis=1) == targets

        shape = batch["targets"].shape
        tokens = jax.tree.map(_in_parts, (x.reshape(-1, x.shape[-1]), batch["targets"].ravel()))
        made = lax.map(of_tokens, tokens)
        return jax.tree.map(lambda leaf: leaf.ravel()[: math.prod(shape)].reshape(shape), made)

    arguments = (dict.fromkeys(_READ, SEQUENCES),)
    return sharded_program(config, mesh, score_shards, arguments, (SEQUENCES, SEQUENCES))


def _in_parts(tokens: jax.Array) -> jax.Array:
    """Pad `tokens` [N, ...] and divide them into parts, [parts, `_TOKENS_AT_ONCE`, ...]."""
    missing = -len(tokens) % _TOKENS_AT_ONCE
    padded = jnp.pad(tokens, [(0, missing)] + [(0, 0)] * (tokens.ndim - 1))
    return padded.reshape(-1, _TOKENS_AT_ONCE, *tokens.shape[1:])
