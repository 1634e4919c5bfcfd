"""The vocabulary of a model, which the stages of a pipeline share.

Each stage holds some rows of the table of tokens and some columns of the head's kernel. All of them
embed a microbatch, and the first stage gets the sum. All get the stream of the last layer, and the
last stage gets the sum of their shares of its cotangent:

    stage 0    rows 0 1 ─┬─► stream          ─┬─ logits 0 1 ─┬─
    stage 1    rows 2 3 ─┤                   ─┤─ logits 2 3 ─┤─
    stage 2    rows 4 5 ─┘          stream x ─┴─ logits 4 5 ─┴─► cotangent of x

(Yeung et al. 2024, "Balancing Pipeline Parallelism with Vocabulary Parallelism".) Against a head
whose positions they share, a stream is sent whole where it was scattered. Weights, gradients and
moments of table and kernel are as much smaller as there are stages, and no stage adds up all of a
gradient.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import collective_scope, to_varying
from geojax.models.chunk.chunk import HeadGradients, Microbatch, ModelFunctions
from geojax.models.declaration import Parameters


@dataclasses.dataclass(frozen=True)
class SharedVocabulary:
    """Embedding and head that all stages share; all ranks of the mesh call it at the same time."""

    functions: ModelFunctions
    """The pieces of the model with this rank's share of the vocabulary."""
    axes: tuple[str, ...]
    """The mesh axes that number the stages, all of one site."""
    first: int
    """The stage that begins with the embedded stream."""
    last: int
    """The stage that has the stream after the last layer."""

    @jax.named_scope("embedding")
    def embedded(self, weights: Parameters, microbatch: Microbatch) -> jax.Array:
        """Embed the tokens of a microbatch; all stages get the stream."""
        return self._sum(self.functions.embed(weights, microbatch))

    @jax.named_scope("embedding")
    def of_first_stage(self, cotangent: jax.Array) -> jax.Array:
        """Hand all stages the first one's cotangent of the embedded stream."""
        return self._of_stage(self.first, cotangent)

    @jax.named_scope("head")
    def head_gradients(
        self, weights: Parameters, x: jax.Array, microbatch: Microbatch
    ) -> HeadGradients:
        """Run the head forwards and backwards.

        Args:
            weights: this stage's share of the head's.
            x: the stream after the last layer, on the stage that has it; anything elsewhere.
            microbatch: all of it.

        Returns:
            The loss, on the last stage and 0 elsewhere; the gradients of the share; and the
            cotangent of the stream.
        """
        made = self.functions.head_gradients(weights, self._of_stage(self.last, x), microbatch)
        return made._replace(loss=self._counted(made.loss), x=self._sum(made.x))

    def loss(self, weights: Parameters, x: jax.Array, microbatch: Microbatch) -> jax.Array:
        """Sum the losses, on the last stage and 0 elsewhere; arguments as `head_gradients`."""
        x = self._of_stage(self.last, x)
        return self._counted(self.functions.head(weights, x, microbatch))

    def _of_stage(self, stage: int, x: jax.Array) -> jax.Array:
        return self._sum(jnp.where(self._is(stage), x, 0))

    def _sum(self, x: jax.Array) -> jax.Array:
        with collective_scope("psum", self.axes):
            return to_varying(lax.psum(x, self.axes), self.axes)

    def _counted(self, loss: jax.Array) -> jax.Array:
        return jnp.where(self._is(self.last), loss, 0)

    def _is(self, stage: int) -> jax.Array:
        return lax.axis_index(self.axes) == stage
