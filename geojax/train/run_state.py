"""The state of a run: begun, saved and restored alike by one program and by islands."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax

from geojax.checkpoint import Checkpointer
from geojax.checkpoint.reading.initial_weights import InitialWeights, read_weights, with_weights
from geojax.step.state import TrainState, with_own_sites, with_saved_sites
from geojax.train.runtime import Runtime

State = TypeVar("State")


def begin(runtime: Runtime[State], weights: InitialWeights | None = None) -> State:
    """Return the state before the first step; `weights` take the place of random ones.

    Where the model has adapters, they are the frozen weights.
    """
    state = runtime.initial_state()
    if weights is None:
        return state
    whole = runtime.as_saved(state)
    if runtime.layouts.frozen is not None:
        return runtime.from_saved(_with_frozen(runtime, whole, weights))
    return runtime.from_saved(
        with_weights(whole, weights, runtime.layouts.parameters, runtime.plan.mesh)
    )


def _with_frozen(runtime: Runtime[Any], whole: TrainState, weights: InitialWeights) -> TrainState:
    """Return the state with `weights` in the place of frozen ones, which are freed first."""
    for leaf in jax.tree.leaves(whole.frozen):
        leaf.delete()
    frozen = read_weights(weights, runtime.layouts.frozen, runtime.plan.mesh)
    return dataclasses.replace(whole, frozen=frozen)


def save(
    runtime: Runtime[State],
    checkpointer: Checkpointer,
    step: int,
    state: State,
    metadata: Mapping[str, Any],
) -> None:
    """Save what the devices hold as the checkpoint of `step`, but for frozen weights.

    Raises:
        RunError: sites do not hold the same weights where they should.
    """
    whole = runtime.as_saved(state)
    agreed = runtime.agree_on_save(step, whole)
    if agreed is not None:
        checkpointer.run = agreed.run
        if agreed.membership_id is not None:
            checkpointer.membership_id = agreed.membership_id
    saved, layouts = (dataclasses.replace(each, frozen=None) for each in (whole, runtime.layouts))
    checkpointer.save(step, saved, layouts, metadata, runtime.parts)


def restore(
    runtime: Runtime[State],
    checkpointer: Checkpointer,
    model: Mapping[str, Any],
    frozen: InitialWeights | None = None,
) -> tuple[State, dict[str, Any]]:
    """Restore the newest checkpoint that all sites have, whichever join and sites saved it.

    Args:
        runtime: computes the steps.
        checkpointer: the run's checkpoints.
        model: the model's config, which must be that of the checkpoint.
        frozen: the weights that adapters adapt, which no checkpoint holds; None: the run has none.

    Returns:
        The state, and the metadata that it was saved with.

    Raises:
        UserError: there is no checkpoint, or not of this model; or the sites have no step in
            common.
        RunError: another site is lost.
    """
    layouts = dataclasses.replace(runtime.layouts, frozen=None)
    saved, metadata = checkpointer.restore(
        layouts, model=model, adapt=with_saved_sites, parts=runtime.parts
    )
    whole = with_own_sites(saved, layouts, runtime.plan)
    if frozen is not None:
        whole = _with_frozen(runtime, whole, frozen)
    return runtime.from_saved(whole), metadata
