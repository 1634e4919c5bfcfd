"""The head of a pipeline, whose positions the stages of a site share.

The last stage scatters the stream of a microbatch. Each of the stages runs the head on its own
positions, forwards and backwards, and the cotangents are gathered. The stages would otherwise wait
while the last one does all of it:

    stage 0    ─┬─ head of positions 0 1 ─┬─
    stage 1    ─┤─ head of positions 2 3 ─┤─
    stage 2  x ─┴─ head of positions 4 5 ─┴─ cotangent of x
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import collective_scope
from geojax.models.chunk.chunk import HeadGradients, Microbatch, ModelFunctions
from geojax.models.declaration import Parameters
from geojax.models.parallel.shares import in_shares


@dataclasses.dataclass(frozen=True)
class SharedPositions:
    """A head whose positions the stages of one site share.

    All ranks of the mesh call it at the same time.
    """

    functions: ModelFunctions
    axes: tuple[str, ...]
    """The mesh axes that number the stages; the last one those of a site."""
    stages: range
    """The stages of one site. Those of other sites compute on positions that do not count."""
    last: int
    """The stage that has the stream."""

    @jax.named_scope("head")
    def head_gradients(
        self, weights: Parameters, x: jax.Array, microbatch: Microbatch
    ) -> HeadGradients:
        """Run the head forwards and backwards.

        Args:
            weights: of the head.
            x: the stream after the last layer, on the stage that has it; anything elsewhere.
            microbatch: all of it.

        Returns:
            Loss and gradients of this stage's positions, and the cotangent of the whole stream.
        """
        made = self.functions.head_gradients(weights, self._own(x), self._share(microbatch))
        with collective_scope("all_gather", self.axes[-1]):
            cotangent = lax.all_gather(made.x, self.axes[-1], axis=1, tiled=True)
        return made._replace(x=cotangent[:, : x.shape[1]])

    def loss(self, weights: Parameters, x: jax.Array, microbatch: Microbatch) -> jax.Array:
        """Sum the losses of this stage's positions; arguments as `head_gradients`."""
        return self.functions.head(weights, self._own(x), self._share(microbatch))

    def _own(self, x: jax.Array) -> jax.Array:
        """Scatter the stream: this stage's positions."""
        is_last = lax.axis_index(self.axes) == self.last
        padded = in_shares(jnp.where(is_last, x, 0), len(self.stages))
        with collective_scope("psum_scatter", self.axes[-1]):
            return lax.psum_scatter(padded, self.axes[-1], scatter_dimension=1, tiled=True)

    def _share(self, microbatch: Microbatch) -> Microbatch:
        stage = lax.axis_index(self.axes)
        counts = (stage >= self.stages.start) & (stage < self.stages.stop)
        share = lax.axis_index(self.axes[-1])
        assert self.functions.head_share is not None, "a head of whole sequences is not shared"
        return self.functions.head_share(microbatch, len(self.stages), share, counts)
