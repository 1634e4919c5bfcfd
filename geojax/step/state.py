"""The training state, which a step updates and a checkpoint holds."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from geojax.models import AnyModel, Parameters, init_parameters, parameter_shapes
from geojax.models.frozen import combine, frozen_part, mark_frozen, trained_part
from geojax.models.parallel.partition import partitions
from geojax.named_arrays import AMAX_HISTORY, shape_and_dtype
from geojax.optim.averages import evaluated_weights
from geojax.optim.optimizer import optimizer_layouts
from geojax.precision import LossScale
from geojax.sharding import LeafLayout, leaf_layouts
from geojax.step.amax_history import history_layouts
from geojax.step.error_feedback import error_layouts, saved_errors, share_errors_among_sites
from geojax.step.plan import StepPlan
from geojax.step.stage_layers import stage_assignments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Master weights, optimizer state and counters; each a global, sharded array on the mesh."""

    step: Any
    """int32: steps done, skipped ones included; also the position in the data. The learning rate
    goes by the updates that the optimizer has counted, which are fewer."""

    parameters: Any
    """Master weights, at least fp32: parts, sharded over (data, expert), padded, on the stages that
    use them. None in the place of those that are frozen."""

    optimizer: Any
    """The optax state; moments are sharded as their parameters are."""

    skipped: Any
    """int32: steps skipped so far because of a non-finite loss or gradient."""

    skipped_in_a_row: Any
    """int32: steps skipped since the last one that was applied."""

    loss_scale: Any = None
    """The `LossScale` of fp16; None under other policies."""

    amax_history: Any = None
    """float32 [layers, sites, 3, steps] of each linear layer under an FP8 recipe that has one (see
    `geojax.step.amax_history`); None under others."""

    error_feedback: Any = None
    """Rounding errors of each parameter's gradient on the link, of each site (see
    `geojax.step.error_feedback`); None without error feedback."""

    frozen: Any = None
    """Frozen weights, in the dtype that they are computed in and never sharded over sites; None in
    the place of trained ones (see `geojax.models.frozen`). None: all are trained."""

    @property
    def weights(self) -> Any:
        """Trained and frozen weights, the latter marked."""
        return combine(self.parameters, self.frozen)

    @property
    def evaluated_weights(self) -> Any:
        """The `weights` to evaluate: an average, if the optimizer keeps one."""
        return combine(evaluated_weights(self.parameters, self.optimizer), self.frozen)


def parameter_layouts(model: AnyModel, plan: StepPlan) -> Any:
    """Lay out each of the model's weights: a tree of `LeafLayout`s, those of frozen ones marked."""
    stages = None
    if plan.staged_layers:
        stages = stage_assignments(model, plan.staged_layers, plan.stage_axes)

    def lay_out(*, across_sites: bool) -> Any:
        return leaf_layouts.parameter_layouts(
            parameter_shapes(model, plan.policy.master_dtype),
            plan.mesh,
            partitions(model, plan.parallelism),
            sharded=plan.layout.zero.stage > 0,
            across_sites=across_sites,
            stages=stages,
        )

    def computed(leaf: LeafLayout) -> LeafLayout:
        return leaf.computed_in(plan.policy.compute_dtype)

    trained = trained_part(mark_frozen(model, lay_out(across_sites=plan.layout.zero.across_sites)))
    frozen = frozen_part(mark_frozen(model, lay_out(across_sites=False)))
    return combine(trained, jax.tree.map(computed, frozen))


def state_layouts(
    model: AnyModel, optimizer: optax.GradientTransformation, plan: StepPlan
) -> TrainState:
    """Lay out every leaf of the state of `model`: a tree of `LeafLayout`s."""
    weights = parameter_layouts(model, plan)
    parameters = trained_part(weights)
    count = leaf_layouts.replicated(jax.ShapeDtypeStruct((), jnp.int32))
    loss_scale = None
    if plan.policy.scales_loss:
        start = functools.partial(LossScale.start, plan.loss_scale)
        loss_scale = jax.tree.map(leaf_layouts.replicated, jax.eval_shape(start))
    return TrainState(
        step=count,
        parameters=parameters,
        optimizer=optimizer_layouts(optimizer, parameters),
        skipped=count,
        skipped_in_a_row=count,
        loss_scale=loss_scale,
        amax_history=history_layouts(model, plan),
        error_feedback=error_layouts(parameters, plan),
        frozen=frozen_part(weights),
    )


def initial_state(
    model: AnyModel,
    optimizer: optax.GradientTransformation,
    layouts: TrainState,
    plan: StepPlan,
    seed: int,
    held: Callable[[Parameters], Parameters] = lambda parameters: parameters,
) -> TrainState:
    """Make the state before the first step on its devices.

    Its values are the same on every mesh, but for a last bit (see `init_parameters`).

    Args:
        model: the model.
        optimizer: the optax chain that runs on shards.
        layouts: from `state_layouts`.
        plan: how the step runs.
        seed: seed of the weights.
        held: cuts what the mesh holds out of the model's parameters.
    """
    dtype = jax.tree.leaves(layouts.parameters)[0].dtype

    def zeros(layouts: Any) -> Any:
        return jax.tree.map(
            lambda leaf_layout: jnp.zeros(leaf_layout.padded_shape, leaf_layout.dtype), layouts
        )

    def make(key: jax.Array) -> TrainState:
        weights = mark_frozen(model, held(init_parameters(model, key, dtype)))

        def padded(part: Any, layouts: Any) -> Any:
            return jax.tree.map(lambda leaf, own: own.pad(leaf.astype(own.dtype)), part, layouts)

        parameters = padded(trained_part(weights), layouts.parameters)
        return TrainState(
            step=jnp.int32(0),
            parameters=parameters,
            optimizer=optimizer.init(parameters),
            skipped=jnp.int32(0),
            skipped_in_a_row=jnp.int32(0),
            loss_scale=LossScale.start(plan.loss_scale) if plan.policy.scales_loss else None,
            amax_history=zeros(layouts.amax_history),
            error_feedback=zeros(layouts.error_feedback),
            frozen=padded(frozen_part(weights), layouts.frozen),
        )

    compiled = jax.jit(make, out_shardings=leaf_layouts.shardings(layouts, plan.mesh))
    state: TrainState = compiled(jax.random.key(seed))
    return state


def with_saved_sites(layouts: TrainState, saved: Mapping[str, str]) -> TrainState:
    """Lay out the histories and the error feedback for as many sites as a checkpoint has.

    Args:
        layouts: from `state_layouts`.
        saved: the type of each array of the checkpoint by name, as "float32[2,1,3,1024]".
    """
    errors = saved_errors(layouts.error_feedback, layouts.parameters, saved)
    layouts = dataclasses.replace(layouts, error_feedback=errors)
    name = next((name for name in saved if name.startswith(f"{AMAX_HISTORY}.")), None)
    if name is None:
        return layouts
    sites = shape_and_dtype(saved[name])[0][1]

    def with_sites(leaf: LeafLayout) -> LeafLayout:
        if leaf.shape[1] == sites:
            return leaf
        shape = (leaf.shape[0], sites, *leaf.shape[2:])
        return dataclasses.replace(leaf, shape=shape, model_shards=())

    history = jax.tree.map(with_sites, layouts.amax_history)
    return dataclasses.replace(layouts, amax_history=history)


def with_own_sites(restored: TrainState, layouts: TrainState, plan: StepPlan) -> TrainState:
    """Give a restored state the histories and the error feedback of as many sites as this run has.

    If the numbers differ, each site gets the largest amax of all saved sites and its share of their
    errors.
    """

    def resize_history(leaf: jax.Array, own: LeafLayout) -> jax.Array:
        if leaf.shape == own.padded_shape:
            return leaf

        def resize(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(leaf.max(axis=1, keepdims=True), own.padded_shape)

        sharding = NamedSharding(plan.mesh, own.spec())
        resized: jax.Array = jax.jit(resize, out_shardings=sharding)(leaf)
        return resized

    history = jax.tree.map(resize_history, restored.amax_history, layouts.amax_history)
    errors = share_errors_among_sites(restored.error_feedback, layouts.error_feedback, plan)
    return dataclasses.replace(restored, amax_history=history, error_feedback=errors)
