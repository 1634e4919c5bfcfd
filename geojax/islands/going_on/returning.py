"""The return of a site to a run that goes on: it takes the state, follows, and is admitted."""

import contextlib
import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from geojax.islands.going_on.handing_over import handed_part
from geojax.islands.going_on.site_membership import (
    POLL_SECONDS,
    InterruptedStepError,
    SiteMembership,
)
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.programs.values import StepInputs, StepSums
from geojax.islands.walk import Walk
from geojax.membership.events import TakeState
from geojax.sharding import leaf_layouts
from geojax.step.state import TrainState
from geojax.transport.mute import mute


def rehearse(walk: Walk, state: TrainState, signals: jax.Array, inputs: StepInputs) -> TrainState:
    """Run two steps without other sites, so that nothing is new in a step of all.

    The first one compiles. The second one takes a state that an update has made, as do the steps
    after a return: JAX finds a compiled program slowly where its arguments come from elsewhere than
    before, a hundredth of a second of a core each.

    Args:
        walk: the site's.
        state: a state of the run before the first step; donated.
        signals: requests of the site's ranks.
        inputs: the site's share of any batch.

    Returns:
        A state whose weights mean nothing; rounding errors and frozen weights are those of `state`.
    """
    alone = mute(walk.transport.site, walk.transport.site_names)
    rehearsal = Walk(walk.actions, walk.windows, walk.programs, alone)
    made: list[StepSums] = []

    def keep(sums: StepSums) -> None:
        made.append(sums)
        raise InterruptedStepError("the update of a rehearsal is that of a follower")

    with contextlib.suppress(InterruptedStepError):
        rehearsal.step(state, signals, [inputs], None, keep)
    (sums,) = made
    updated, _ = walk.programs.update(state, sums)
    no_errors = jax.tree.map(jnp.zeros_like, updated.error_feedback)
    inputs = inputs._replace(loss_scale=updated.loss_scale, step=updated.step)
    updated, _ = rehearsal.step(updated, signals, [inputs])
    return jax.block_until_ready(dataclasses.replace(updated, error_feedback=no_errors))


def take_state(
    membership: SiteMembership, programs: SitePrograms, state: TrainState, last_step: int
) -> TrainState:
    """Wait for the state of the sites that take part; `state` keeps what is this site's own.

    Args:
        membership: the site's.
        programs: the site's.
        state: a state of the run before the first step.
        last_step: last step of the run.

    Raises:
        RunError: a site that takes part is lost.
    """
    like = handed_part(leaf_layouts.abstract(programs.layouts, programs.plan.mesh))
    membership.begin_return(programs.sums, like, last_step=last_step)
    while (followed := _follow(membership, programs, state)) is None:
        time.sleep(POLL_SECONDS)
    _, state = followed
    return state


def catch_up(
    membership: SiteMembership,
    programs: SitePrograms,
    state: TrainState,
    come_to: Callable[[int], None],
) -> TrainState:
    """Do the steps that others have done meanwhile, by their sums, until this site takes part.

    Args:
        membership: the site's.
        programs: the site's.
        state: from `take_state`.
        come_to: called with each step that the state has come to.

    Raises:
        RunError: a site that takes part is lost.
    """
    membership.be_admitted()
    while not membership.end_return():
        if (followed := _follow(membership, programs, state)) is None:
            time.sleep(POLL_SECONDS)
        else:
            step, state = followed
            come_to(step)
    return state


def _follow(
    membership: SiteMembership, programs: SitePrograms, state: TrainState
) -> tuple[int, TrainState] | None:
    """Let the devices do the work that has come; return its step and the state after it, or None.

    From its admission on, the others wait for this site's devices.
    """
    if (work := membership.followed_work()) is None:
        return None
    action, values = work
    if isinstance(action, TakeState):
        own = {"error_feedback": state.error_feedback, "frozen": state.frozen}
        return action.step, dataclasses.replace(values, **own)
    followed, _ = programs.update(state, values)
    return action.step, jax.block_until_ready(followed)
