"""Error feedback: what rounding took away from the gradients on the link, added to the next ones.

The errors of a leaf are [sites, ...], of the layers' leaves [layers, sites, ...], sharded as its
gradient is and in the reduction dtype. They are sums over the tokens of a batch, as gradients are
where they cross, without a loss scale. `geojax.collectives.wire_format` says how they come about.

Only their sum over the sites matters, so a checkpoint restores onto any layout: on another number
of sites each gets an equal share of that sum. A run without error feedback drops them, at most one
step's rounding.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from geojax.named_arrays import ERROR_FEEDBACK, leaf_name, shape_and_dtype
from geojax.sharding.leaf_layouts import DimSharding, LeafLayout
from geojax.sharding.stage_assignment import StageAssignment
from geojax.step.plan import StepPlan


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
        errors = _with_sites(layout, dim, sites, plan.policy.reduce_dtype)
        own_site = DimSharding(dim, ("dc",), sites)
        return dataclasses.replace(errors, model_shards=(*errors.model_shards, own_site))

    return jax.tree_util.tree_map_with_path(of_leaf, parameters)


def errors_of_site(errors: Any, site: int, sites: int) -> Any:
    """Lay out the errors of a site that is a runtime of its own as one of those of all sites."""
    return jax.tree_util.tree_map_with_path(
        lambda path, layout: layout.at_site(_site_dim(path), site, sites), errors
    )


def saved_errors(wanted: Any, parameters: Any, saved: Mapping[str, str]) -> Any:
    """Lay out the errors that a checkpoint holds, of its number of sites; None: it holds none.

    Args:
        wanted: the `LeafLayout` of each of this run's errors; None: none.
        parameters: that of each parameter.
        saved: the type of each array of the checkpoint by name, as "float32[2,16,64]".
    """
    if not any(name.startswith(f"{ERROR_FEEDBACK}.") for name in saved):
        return None

    def of_leaf(path: Any, parameter: LeafLayout, own: LeafLayout | None) -> LeafLayout:
        name = f"{ERROR_FEEDBACK}.{leaf_name(path)}"
        shape, dtype = shape_and_dtype(saved.get(name, "float32[]"))
        if own is not None and own.shape == shape:
            return own
        dim = _site_dim(path)
        sites = shape[dim] if dim < len(shape) else 1
        return dataclasses.replace(_with_sites(parameter, dim, sites, dtype), shape=shape)

    if wanted is None:
        wanted = jax.tree.map(lambda _: None, parameters)
    return jax.tree_util.tree_map_with_path(of_leaf, parameters, wanted)


def share_errors_among_sites(restored: Any, layouts: Any, plan: StepPlan) -> Any:
    """Share restored errors among the sites of this run.

    Args:
        restored: errors of any number of sites; None: a run that kept none has been saved.
        layouts: the `LeafLayout` of each of this run's errors; None: none.
        plan: how a step of this run runs.
    """

    def of_leaf(path: Any, own: LeafLayout, saved: jax.Array | None) -> jax.Array:
        sharding, shape = NamedSharding(plan.mesh, own.spec()), own.padded_shape
        dim = _site_dim(path) + own.has_stage_dim

        def shared(saved: jax.Array) -> jax.Array:
            total = jnp.sum(saved, axis=dim, keepdims=True)
            return jnp.broadcast_to(total / (shape[dim] * plan.islands), shape)

        if saved is None:
            zeros: jax.Array = jnp.zeros(shape, own.dtype, device=sharding)
            return zeros
        if saved.shape == shape:
            return saved
        made: jax.Array = jax.jit(shared, out_shardings=sharding)(saved)
        return made

    if layouts is None:
        return None
    if restored is None:
        restored = jax.tree.map(lambda _: None, layouts)
    return jax.tree_util.tree_map_with_path(of_leaf, layouts, restored)


def _with_sites(layout: LeafLayout, dim: int, sites: int, dtype: Any) -> LeafLayout:
    """Return the layout of a parameter's errors at `sites`, counted by `dim`, on every site.

    Those of a leaf without layers are on all stages, each of which sends a share of its gradient.
    """
    stages = layout.stages
    if stages is not None and not stages.stacked:
        stages = StageAssignment.on(stages.axes, stages.stages, range(stages.stages))

    def moved(sharding: DimSharding) -> DimSharding:
        return dataclasses.replace(sharding, dim=sharding.dim + int(sharding.dim >= dim))

    return dataclasses.replace(
        layout,
        stages=stages,
        shape=(*layout.shape[:dim], sites, *layout.shape[dim:]),
        dtype=jnp.dtype(dtype),
        model_shards=tuple(map(moved, layout.model_shards)),
        shard=layout.shard and moved(layout.shard),
    )


def _site_dim(path: Any) -> int:
    """Return the dimension of sites in the errors of the parameter at `path`."""
    return 1 if path[0].key == "layers" else 0
