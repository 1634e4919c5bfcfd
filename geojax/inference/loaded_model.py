"""The weights of a model on a mesh, for programs that only read them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from geojax.checkpoint.reading.merged_model import MergedModel
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.models import (
    AnyModel,
    Parallelism,
    Parameters,
    check_parallelism,
    parameter_shapes,
    partitions,
)
from geojax.sharding import leaf_layouts

BATCH_AXES = ("data", "expert")
"""The mesh axes over which sequences are sharded."""

SEQUENCES = PartitionSpec(BATCH_AXES)
"""The sharding of arrays whose first dim counts sequences."""


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model whose weights lie on a mesh of the axes data, expert and tensor.

    The ranks of `tensor` share every layer, those of `expert` the experts, and those of `data` the
    sequences.
    """

    config: AnyModel
    mesh: Mesh
    parameters: Parameters
    """The weights, sharded over `tensor` and `expert` alone."""

    @classmethod
    def load(
        cls, saved: SavedModel | MergedModel, config: AnyModel, mesh: Mesh, dtype: Any
    ) -> "LoadedModel":
        """Read a saved run's weights onto `mesh`, whatever mesh they were saved from.

        Raises:
            UserError: the mesh cannot share the model.
        """
        # The modules that predict later tokens have no part in what programs here compute.
        config = config.for_evaluation
        refuse_mesh(config, mesh)
        return cls(config, mesh, saved.read(weight_layouts(config, mesh, dtype), mesh))

    @classmethod
    def on_one_device(cls, config: AnyModel, parameters: Parameters) -> "LoadedModel":
        """Take weights that lie unsharded on one device of this process."""
        (device,) = jax.tree.leaves(parameters)[0].devices()
        return cls(config, make_mesh(devices=[device]), parameters)

    @property
    def ranks(self) -> int:
        """The ranks that a batch's sequences are shared by."""
        return self.mesh.shape["data"] * self.mesh.shape["expert"]


def refuse_mesh(config: AnyModel, mesh: Mesh) -> None:
    """Raise a UserError if `mesh` cannot share the model."""
    check_parallelism(config.for_evaluation, parallelism_of(mesh), sequence=1)


def serving_mesh(data: int, expert: int, tensor: int) -> Mesh:
    """Make a mesh over the first devices of this process.

    Raises:
        UserError: there are too few.
    """
    needed, devices = data * expert * tensor, jax.local_devices()
    if needed > len(devices):
        hint = f", or GEOJAX_SIMULATE_DEVICES={needed}" if devices[0].platform == "cpu" else ""
        raise UserError(
            f"mesh: data={data} x expert={expert} x tensor={tensor} takes {needed} devices, and "
            f"there are {len(devices)}; sizes that multiply to at most that would be right{hint}"
        )
    return make_mesh(data=data, expert=expert, tensor=tensor, devices=devices[:needed])


def parallelism_of(mesh: Mesh) -> Parallelism:
    """Return the sharding of a model over `mesh`."""
    return Parallelism(tensor=mesh.shape["tensor"], expert=mesh.shape["expert"])


def weight_layouts(config: AnyModel, mesh: Mesh, dtype: Any) -> Any:
    """Lay out the weights of `config` on `mesh`, to compute in `dtype`: a tree of `LeafLayout`s."""
    layouts = leaf_layouts.parameter_layouts(
        parameter_shapes(config, dtype),
        mesh,
        partitions(config, parallelism_of(mesh)),
        sharded=False,
    )
    return jax.tree.map(lambda leaf: leaf.computed_in(dtype), layouts)


def sharded_program(
    config: AnyModel, mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Any:
    """Jit `function` of a model's shards and of further arguments, one call on every rank.

    Args:
        config: the model.
        mesh: the mesh that shares it.
        function: called with the rank's shards of the weights, and of the other arguments.
        in_specs: a tuple with the shardings of those.
        out_specs: of the results.
    """
    specs = jax.tree.map(lambda leaf: leaf.spec(), weight_layouts(config, mesh, jnp.float32))
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=(specs, *in_specs), out_specs=out_specs, check_vma=True
        )
    )
