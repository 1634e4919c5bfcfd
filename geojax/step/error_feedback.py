"""Error feedback: what rounding took away from the gradients on the link, added to the next ones.

The errors of a leaf are [sites, ...], of the layers' leaves [layers, sites, ...], sharded as its
gradient is and in the reduction dtype. They are sums over the tokens of a batch, as gradients are
where they cross, without a loss scale. `geojax.collectives.codec` says how they come about.

Only their sum over the sites matters, so a checkpoint restores onto any layout: on another number
of sites each gets an equal share of that sum. A run without error feedback drops them, at most one
step's rounding.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from geojax.optim.layout import DimSharding, LeafLayout
from geojax.optim.stage_assignment import PADDING_LAYER
from geojax.step.plan import StepPlan

NAME = "error_feedback"
"""The name of the field in the training state."""


def error_layouts(parameters: Any, plan: StepPlan) -> Any:
    """Return the `LeafLayout` of each parameter's errors; None where none are kept.

    Args:
        parameters: the `LeafLayout` of each parameter.
        plan: how the step runs.
    """
    if not plan.keeps_error_feedback:
        return None
    sites = plan.mesh.shape["dc"]

    def of_leaf(path: Any, layout: LeafLayout) -> LeafLayout:
        dim = _site_dim(path)
        if layout.stages is not None and layout.stages.shared:
            assert layout.stages.order[0] != PADDING_LAYER, (
                "the first stage must hold a shared leaf"
            )

        def moved(sharding: DimSharding) -> DimSharding:
            return dataclasses.replace(sharding, dim=sharding.dim + int(sharding.dim >= dim))

        return dataclasses.replace(
            layout,
            shape=(*layout.shape[:dim], sites, *layout.shape[dim:]),
            dtype=plan.policy.reduce_dtype,
            model_shards=(*map(moved, layout.model_shards), DimSharding(dim, ("dc",), sites)),
            shard=layout.shard and moved(layout.shard),
        )

    return jax.tree_util.tree_map_with_path(of_leaf, parameters)


def saved_errors(wanted: Any, parameters: Any, saved: Mapping[str, str]) -> Any:
    """Describe the errors that a checkpoint holds, of its number of sites; None: it holds none.

    Args:
        wanted: this run's errors, whole, as `jax.ShapeDtypeStruct`s with shardings; None: none.
        parameters: the parameters, likewise.
        saved: the type of each array of the checkpoint by name, as "float32[2,16,64]".
    """
    if not any(name.startswith(f"{NAME}.") for name in saved):
        return None

    def of_leaf(path: Any, parameter: Any, own: Any) -> jax.ShapeDtypeStruct:
        name = f"{NAME}.{jax.tree_util.keystr(path, simple=True, separator='.')}"
        dtype, _, sizes = saved.get(name, "float32[]").rstrip("]").partition("[")
        shape = tuple(int(size) for size in sizes.split(",") if size)
        if own is not None and own.shape == shape:
            return own
        axes = [*parameter.sharding.spec]
        axes += [None] * (len(parameter.shape) - len(axes))
        axes.insert(_site_dim(path), None)
        spec = PartitionSpec(*axes[: len(shape)])
        sharding = NamedSharding(parameter.sharding.mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    if wanted is None:
        wanted = jax.tree.map(lambda _: None, parameters)
    return jax.tree_util.tree_map_with_path(of_leaf, parameters, wanted)


def share_errors_among_sites(restored: Any, wanted: Any) -> Any:
    """Share restored errors among the sites of this run.

    Args:
        restored: errors of any number of sites; None: a run that kept none has been saved.
        wanted: those of this run, as `jax.ShapeDtypeStruct`s with shardings; None: none.
    """

    def of_leaf(path: Any, own: jax.ShapeDtypeStruct, saved: jax.Array | None) -> jax.Array:
        def shared(saved: jax.Array) -> jax.Array:
            total = jnp.sum(saved, axis=_site_dim(path), keepdims=True)
            return jnp.broadcast_to(total / own.shape[_site_dim(path)], own.shape)

        if saved is None:
            zeros: jax.Array = jnp.zeros(own.shape, own.dtype, device=own.sharding)
            return zeros
        if saved.shape == own.shape:
            return saved
        made: jax.Array = jax.jit(shared, out_shardings=own.sharding)(saved)
        return made

    if wanted is None:
        return None
    if restored is None:
        restored = jax.tree.map(lambda _: None, wanted)
    return jax.tree_util.tree_map_with_path(of_leaf, wanted, restored)


def _site_dim(path: Any) -> int:
    """Return the dimension of sites in the errors of the parameter at `path`."""
    return 1 if path[0].key == "layers" else 0
