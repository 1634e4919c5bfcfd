"""Validation on sites that hold a part of the model each: a walk forwards through all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from geojax.islands.actions import Receive, Send, SiteAction, received, sent
from geojax.islands.values import StepInputs
from geojax.islands.walk import Walk
from geojax.pipeline.schedule import Action


class Validation:
    """The validation of one site.

    Args:
        walk: the site's, for its programs and its transport.
        actions: the site's (see `geojax.islands.actions.forward_actions`).
        windows: messages to fetch ahead from each other site.
    """

    def __init__(self, walk: Walk, actions: Sequence[SiteAction], windows: Mapping[int, int]):
        self._walk, self._actions, self._windows = walk, actions, windows

    def sums(self, state: Any, inputs: StepInputs) -> jax.Array:
        """Return [sum of losses, number of targets] of a batch, without dropout, of this site.

        They are zeros where the site has no head.

        Args:
            state: the site's `TrainState`.
            inputs: the batch.

        Raises:
            RunError: another site is lost.
        """
        walk, programs = self._walk, self._walk.programs
        messages = walk.begin_messages(self._actions, self._windows)
        weights = programs.gather(state.evaluated_weights, state.amax_history)
        of_chunk = {chunk: programs.chunk_weights(weights, chunk) for chunk in programs.part.chunks}
        taken_by: dict[Action, Any] = {}
        losses = []
        for action in self._actions:
            match action:
                case Receive():
                    ((sender, message),) = received(action)
                    taken_by[action.action] = programs.whole(messages.take(sender, message))
                case Send():
                    ((receiver, message),) = sent(action)
                    messages.offer(receiver, message, programs.divide(taken_by.pop(action.action)))
                case Action(_, microbatch, chunk):
                    x = taken_by.pop(action, None)
                    made = programs.forward_only[chunk](
                        of_chunk[chunk], x, inputs, np.int32(microbatch)
                    )
                    if programs.part.is_last(chunk):
                        losses.append(made)
                    else:
                        taken_by[action._replace(chunk=chunk + 1)] = made
        sums: jax.Array = programs.validation_sums(losses, inputs)
        return sums
