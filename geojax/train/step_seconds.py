"""The seconds of a step, by what the devices did in them."""

from typing import NamedTuple


class HostTimes(NamedTuple):
    """Times of the host on the monotonic clock for one step."""

    batch_ready: float
    """The batch is there."""
    dispatched: float
    """The step's program has been given to the devices."""
    held_until: float = 0.0
    """A profile kept the host from the step until then; the devices had nothing to do."""


class StepSeconds(NamedTuple):
    """The seconds of a step; the parts add up to all of them."""

    total: float
    data: float
    """Devices waited for the batch."""
    dispatch: float
    """Devices waited for the host to dispatch the step."""
    waiting: float
    """Devices waited for other sites."""
    device: float
    """The rest: devices computed, or waited for each other."""


def split_seconds(
    previous_end: float, host: HostTimes, end: float, waiting: float | None
) -> StepSeconds:
    """Divide a step's seconds: a step begins where the one before, or a profile of it, ended.

    Args:
        previous_end: the end of the step before, or the time from which this one counts.
        host: the host's times; what it did before `previous_end` was hidden behind that step.
        end: the end of the step.
        waiting: seconds in which devices waited for other sites, as islands measure them; their
            host walks the messages, so that dispatch is no part of its own. None: one program,
            which does not tell.
    """
    previous_end = max(previous_end, host.held_until)
    total = end - previous_end
    data = min(max(host.batch_ready - previous_end, 0.0), total)
    if waiting is not None:
        waited = min(waiting, total - data)
        return StepSeconds(total, data, 0.0, waited, total - data - waited)
    behind = max(previous_end, host.batch_ready)
    dispatch = min(max(host.dispatched - behind, 0.0), total - data)
    return StepSeconds(total, data, dispatch, 0.0, total - data - dispatch)
