"""The protocol of a tracker, which a class of yours may implement."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """Facts of a run that a tracker is started with."""

    name: str
    """Name of the run directory; among islands followed by /<site>."""
    directory: Path
    """The run directory, among islands the site's."""
    config: Mapping[str, Any]
    """The resolved config, as plain values."""
    version: str
    """Version of geojax."""
    step: int
    """Step that the run goes on from; 0 for a new run."""
    id: str
    """32 hexadecimal digits, which stay the same when the run is started again."""
    site: str
    """Site of the process that tracks."""


class Tracker(Protocol):
    """An observer of the metrics of a run, in a process of its own.

    A call that raises costs what it was to record, and the next call is made all the same.
    """

    def start(self, run: TrackedRun) -> None:
        """Begin or go on with the record of `run`; called once, before everything else."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a step, by name; some may not be finite.

        A step may come several times with other names, and those of a resumed run come again from
        `run.step` + 1 on.
        """
        ...

    def finish(self, exit_code: int) -> None:
        """End the record; called once.

        Args:
            exit_code: 0 at the end of the run, 128 and a signal's number after that signal, else
                1.
        """
        ...
