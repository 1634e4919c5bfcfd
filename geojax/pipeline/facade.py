"""A pipeline for a model of your own: its functions, a mesh and the name of a schedule."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.collectives import all_reduce
from geojax.collectives.axes import vary_over, varying_axes
from geojax.errors import UserError
from geojax.models.chunk.chunk import ModelFunctions
from geojax.pipeline.execution import Executor, StageWeights, TickProgram
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.schedule import Placement
from geojax.pipeline.tick_tables import hops_between_sites, tick_table


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A model's layers on the pipeline stages of a mesh, in the order of a schedule.

    `shard` brings weights to their stages; `loss_and_gradients`, inside a `shard_map`, runs all
    microbatches forwards and backwards. A microbatch is any tree of arrays.

    Example:
        >>> mesh = geojax.make_mesh(dc=2, stage=2, data=2)  # four stages, two in each site
        >>> pipeline = geojax.Pipeline(
        ...     mesh,
        ...     embed=lambda weights, batch: batch * weights,
        ...     layer=lambda weights, x: jnp.tanh(weights * x),
        ...     head=lambda weights, x, batch: jnp.sum(weights * x),
        ...     microbatches=4,
        ...     schedule="1f1b",
        ... )
        >>> weights = pipeline.shard(jnp.ones(()), jnp.ones(8), jnp.ones(()))  # eight layers
        >>> step = jax.shard_map(
        ...     pipeline.loss_and_gradients,
        ...     mesh=mesh,
        ...     in_specs=(pipeline.weights_spec, jax.P(None, "data")),  # [M, B]
        ...     out_specs=(jax.P(), pipeline.weights_spec),
        ... )
        >>> loss, gradients = jax.jit(step)(weights, jnp.ones((4, 2)))
        >>> print(f"{loss:.3f}", gradients.layers.shape)
        3.131 (8,)
    """

    mesh: Mesh
    """A mesh of `geojax.make_mesh`."""

    embed: Callable[[Any, Any], jax.Array] = dataclasses.field(kw_only=True)
    """(weights, microbatch) to the stream before the first layer."""

    layer: Callable[[Any, jax.Array], jax.Array] = dataclasses.field(kw_only=True)
    """(the weights of a layer, the stream) to the stream after it, of the same shape."""

    head: Callable[[Any, jax.Array, Any], jax.Array] = dataclasses.field(kw_only=True)
    """(weights, the stream after the last layer, microbatch) to the sum of the losses."""

    microbatches: int = dataclasses.field(kw_only=True)
    """The number of microbatches of a step."""

    schedule: str = "1f1b"
    """The name of an entry in `geojax.pipeline.registry`."""

    axes: tuple[str, ...] = ("dc", "stage")
    """The mesh axes that number the stages; ("stage",) for a pipeline in each site."""

    virtual_stages: int | None = None
    """The chunks of a stage; None: as many as the schedule requires, or one."""

    hop_ticks: int = 1
    """Ticks of a message between sites; from two on it travels while all stages compute."""

    sum_dtype: Any = jnp.float32
    """The dtype of the gradients' sums over microbatches."""

    @property
    def weights_spec(self) -> PartitionSpec:
        """The partition spec of every leaf of the weights and gradients."""
        return PartitionSpec(self.axes)

    @functools.cached_property
    def placement(self) -> Placement:
        """The stage of each chunk."""
        entry = schedule_entry(self.schedule)
        chunks = self.virtual_stages or entry.virtual_stages or 1
        sites = self.mesh.shape["dc"] if "dc" in self.axes else 1
        return entry.placement((self.mesh.shape["stage"],) * sites, chunks)

    @functools.cached_property
    def executor(self) -> Executor:
        """The program of ticks with the model's functions.

        Raises:
            UserError: the schedule does not exist, or cannot have these stages or microbatches.
        """
        hops = hops_between_sites(self.placement, self.mesh.shape["stage"], self.hop_ticks)
        ticks = tick_table(self.schedule, self.placement, self.microbatches, hops)
        functions = ModelFunctions(
            embed=lambda weights, batch: self.embed(_own_copy(weights), batch),
            layer=lambda weights, x, number, context: (self.layer(weights, x), None),
            head=lambda weights, x, batch: self.head(_own_copy(weights), x, batch),
        )
        branch_free = schedule_entry(self.schedule).branch_free
        program = TickProgram.of(ticks, branch_free=branch_free)
        return Executor(program, functions, self.axes, sum_dtype=self.sum_dtype)

    def shard(self, embed: Any, layers: Any, head: Any) -> StageWeights:
        """Bring weights to their stages.

        Args:
            embed: the weights of `embed`; every stage gets a copy, and the first one's counts.
            layers: the weights of all layers, each leaf [L, ...].
            head: the weights of `head`; every stage gets a copy, and the last one's counts.

        Raises:
            UserError: the layers do not divide into the chunks.
        """
        order = jnp.array(self._order(len(jax.tree.leaves(layers)[0])))
        copies = self.placement.stages
        first, last = jax.tree.map(lambda leaf: jnp.stack([leaf] * copies), (embed, head))
        weights = StageWeights(first, jax.tree.map(lambda leaf: leaf[order], layers), last)
        return jax.device_put(weights, NamedSharding(self.mesh, self.weights_spec))

    def unshard(self, weights: StageWeights) -> tuple[Any, Any, Any]:
        """Return the weights of `embed`, of all layers in order, and of `head`; also of gradients.

        The inverse of `shard`: the first stage's copy for `embed`, the last chunk's for `head`.
        """
        order = self._order(len(jax.tree.leaves(weights.layers)[0]))
        back = jnp.argsort(jnp.array(order))
        stage_of = self.placement.stage_of
        return (
            jax.tree.map(lambda leaf: leaf[stage_of[0]], weights.first),
            jax.tree.map(lambda leaf: leaf[back], weights.layers),
            jax.tree.map(lambda leaf: leaf[stage_of[-1]], weights.last),
        )

    def loss_and_gradients(
        self, weights: StageWeights, microbatches: Any
    ) -> tuple[jax.Array, StageWeights]:
        """Sum losses and gradients over all microbatches; call it inside a `shard_map`.

        Args:
            weights: this rank's part of `shard`'s, by `weights_spec`.
            microbatches: this rank's, each leaf [M, B, ...]. Ranks of the mesh axes that they vary
                over have sequences of their own.

        Returns:
            The sum of the losses, equal on all ranks, and its gradients, like `weights`.
        """
        own = varying_axes(microbatches) - frozenset(self.axes)
        made = self.executor.gradients(vary_over(weights, own), microbatches)
        intra = tuple(axis for axis in self.mesh.axis_names if axis in own - {"dc"})
        inter = ("dc",) if "dc" in own else ()
        gradients = all_reduce(made.weights, intra, inter)
        loss = all_reduce(made.loss, (*self.axes, *intra), inter)
        return loss, gradients

    def _order(self, layers: int) -> list[int]:
        """Return the numbers of the layers, stage after stage, chunk after chunk."""
        chunks = self.placement.chunks
        if layers % chunks:
            raise UserError(
                f"{layers} layers do not divide into {chunks} chunks; "
                f"{-(-layers // chunks) * chunks} layers would"
            )
        each = layers // chunks
        return [
            chunk * each + layer
            for stage in range(self.placement.stages)
            for chunk in self.placement.chunks_of(stage)
            for layer in range(each)
        ]


def _own_copy(weights: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], weights)
