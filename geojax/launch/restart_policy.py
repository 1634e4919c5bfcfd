"""Restarts of a site by its supervisor: when, and how many."""

HOUR = 3600.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0


class RestartPolicy:
    """The restarts of one site: an attempt that makes a new step costs nothing.

    Args:
        limit: most failures without a new step in an hour.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._failures: list[float] = []
        """Times of failures without a new step, in the last hour."""
        self._in_a_row = 0

    def failed(self, now: float, *, made_step: bool) -> float | None:
        """Count a failure at `now`; return the seconds until the next start, None for no more.

        The delay doubles with each failure in a row that made no step, from 1 s to a minute.
        """
        if made_step:
            self._in_a_row = 0
            return FIRST_DELAY
        self._failures = [time for time in self._failures if now - time < HOUR] + [now]
        if len(self._failures) > self._limit:
            return None
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0**self._in_a_row)
        self._in_a_row += 1
        return delay
