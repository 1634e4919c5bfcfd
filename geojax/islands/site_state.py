"""The training state of a site, whose stages hold a part of the model each, on their own devices.

A checkpoint has the arrays of a site over all of its stages:

    stage 0   layers [2, ...]  embedding [V, H]        site   layers [4, ...] over stage
    stage 1   layers [1, ...]                     ─►          embedding [2, V, H] over stage

Stages with fewer layers, or without a leaf, have zeros there while a checkpoint is made or read.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from geojax.islands.programs.site_part import SitePart
from geojax.named_arrays import leaf_name, leaves_by_name
from geojax.optim.optimizer import optimizer_layouts
from geojax.sharding import LeafLayout, StageAssignment
from geojax.sharding.stage_assignment import PADDING_LAYER
from geojax.step.amax_history import SITE_DIM
from geojax.step.error_feedback import errors_of_site
from geojax.step.plan import StepPlan
from geojax.step.state import TrainState, state_layouts


class SiteState(NamedTuple):
    """The state of each stage of a site that this process holds, or holds a part of."""

    stages: tuple[TrainState, ...]

    @property
    def step(self) -> Any:
        """Steps done; see `TrainState`."""
        return self.stages[0].step

    @property
    def skipped(self) -> Any:
        """Steps skipped so far; see `TrainState`."""
        return self.stages[0].skipped


def site_layouts(
    part: SitePart, optimizer: optax.GradientTransformation, plan: StepPlan
) -> TrainState:
    """Lay out every leaf of a stage's state: a tree of `LeafLayout`s."""
    whole = state_layouts(part.model, optimizer, plan)
    parameters = part.held_layouts(whole.parameters)
    return _of_parameters(whole, parameters, part.layers_layout, optimizer)


def saved_layouts(
    parts: Sequence[SitePart], optimizer: optax.GradientTransformation, plan: StepPlan
) -> TrainState:
    """Lay out every leaf of a site in role stage as a place in the whole model's, for checkpoints.

    Args:
        parts: of each stage of the site.
        optimizer: the optax chain.
        plan: the step of the site or of one of its stages.
    """
    model, axes = parts[0].model, ("stage",) if len(parts) > 1 else ()
    whole = state_layouts(model, optimizer, plan)
    numbers = [[layer for own in part.chunks.values() for layer in own] for part in parts]
    longest = max(map(len, numbers))
    padded = tuple((*own, *[PADDING_LAYER] * (longest - len(own))) for own in numbers)

    def of_layers(layout: LeafLayout) -> LeafLayout:
        return dataclasses.replace(layout, stages=StageAssignment(axes, padded))

    site = SitePart(model, {chunk: own for part in parts for chunk, own in part.chunks.items()})
    parameters = site.held_layouts(whole.parameters, of_layers)
    if axes:
        held = [leaves_by_name(part.held_layouts(whole.parameters)) for part in parts]

        def on_stages(path: Any, layout: LeafLayout) -> LeafLayout:
            if layout.stages is not None:
                return layout
            holders = [stage for stage, own in enumerate(held) if leaf_name(path) in own]
            stages = StageAssignment.on(axes, len(parts), holders)
            return dataclasses.replace(layout, stages=stages)

        parameters = jax.tree_util.tree_map_with_path(on_stages, parameters)
    return _of_parameters(whole, parameters, of_layers, optimizer)


def saved_whole_layouts(layouts: TrainState, plan: StepPlan, site: int) -> TrainState:
    """Lay out every leaf of a site in role data as a place in one program's, for checkpoints.

    Args:
        layouts: from `site_layouts`, of the whole model.
        plan: the step of the site.
        site: number of the site.
    """
    sites, history = plan.islands, layouts.amax_history
    if not plan.share_amax_across_dc:
        history = jax.tree.map(lambda leaf: leaf.at_site(SITE_DIM, site, sites), history)
    errors = errors_of_site(layouts.error_feedback, site, sites)
    return dataclasses.replace(layouts, amax_history=history, error_feedback=errors)


def _of_parameters(
    whole: TrainState,
    parameters: Any,
    of_layers: Callable[[LeafLayout], LeafLayout],
    optimizer: optax.GradientTransformation,
) -> TrainState:
    return dataclasses.replace(
        whole,
        parameters=parameters,
        optimizer=optimizer_layouts(optimizer, parameters),
        amax_history=jax.tree.map(of_layers, whole.amax_history),
    )


def join_stages(state: SiteState, saved: TrainState, mesh: Mesh) -> TrainState:
    """Return the state of a site as its checkpoint has it; shards stay on their devices.

    Args:
        state: the site's, in this process.
        saved: from `saved_layouts`.
        mesh: the site's devices, with the axis of stages.
    """
    if mesh.shape["stage"] == 1:
        return state.stages[0]
    return _laid_out([leaves_by_name(stage) for stage in state.stages], saved, mesh)


def split_stages(
    state: TrainState, layouts: Sequence[TrainState], meshes: Sequence[Mesh], mesh: Mesh
) -> SiteState:
    """Invert `join_stages`.

    Args:
        state: the site's, as its checkpoint has it.
        layouts: from `site_layouts`, of each stage of which this process holds a part.
        meshes: the devices of each of these.
        mesh: the site's devices, with the axis of stages.
    """
    if mesh.shape["stage"] == 1:
        return SiteState((state,))
    leaves = [leaves_by_name(state)]
    return SiteState(
        tuple(_laid_out(leaves, *of_stage) for of_stage in zip(layouts, meshes, strict=True))
    )


def _laid_out(
    sources: Sequence[Mapping[str, jax.Array]], layouts: TrainState, mesh: Mesh
) -> TrainState:
    """Return a state in other layouts, of which each device has its own shard of a source."""

    def laid_out(path: Any, layout: LeafLayout) -> jax.Array:
        name, sharding = leaf_name(path), NamedSharding(mesh, layout.spec())
        shape = sharding.shard_shape(layout.padded_shape)
        here = {
            shard.device: shard.data
            for leaves in sources
            if name in leaves
            for shard in leaves[name].addressable_shards
        }
        shards = [
            _fitted(here[device], shape)
            if device in here
            else jnp.zeros(shape, layout.dtype, device=device)
            for device in sharding.addressable_devices
        ]
        return jax.make_array_from_single_device_arrays(layout.padded_shape, sharding, shards)

    made: TrainState = jax.tree_util.tree_map_with_path(laid_out, layouts)
    return made


def _fitted(shard: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a shard with or without a dim of stages, or with more or fewer layers."""
    if shard.ndim != len(shape):
        return shard[None] if shard.ndim < len(shape) else shard[0]
    missing = shape[0] - shard.shape[0] if shape else 0
    if missing > 0:
        return jnp.pad(shard, ((0, missing), *[(0, 0)] * (shard.ndim - 1)))
    return shard[: shape[0]] if missing < 0 else shard
