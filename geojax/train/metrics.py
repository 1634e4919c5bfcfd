"""Metrics of a run on disk: one JSON line a step, and TensorBoard."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tensorboardX import SummaryWriter

from geojax.checkpoint import RunDirectory
from geojax.errors import UserError


class MetricsWriter:
    """A writer of `metrics.jsonl` and a TensorBoard log, on one process of a run.

    A resumed run continues the file: lines of steps after the restored one, which the interrupted
    run still wrote, are dropped, so that every step stands in the file once.
    """

    def __init__(self, directory: RunDirectory, step: int):
        """Open the files of a run that goes on from `step`.

        Raises:
            UserError: the files of an earlier run are no metrics, or cannot be written.
        """
        self._directory = directory
        kept = [line for line in read_metrics(directory.metrics) if step and line["step"] <= step]
        temporary = directory.metrics.with_suffix(".partial")
        try:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
            temporary.replace(directory.metrics)
            self._open(step)
        except OSError as error:
            raise UserError(
                f"{directory.metrics}: metrics cannot be written ({error.strerror}); a run needs a "
                "directory in which it may write"
            ) from None

    def open_again(self) -> None:
        """Open new files where the run directory has been made again."""
        self.__exit__()
        self._open(0)

    def _open(self, step: int) -> None:
        self._file = self._directory.metrics.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(
            str(self._directory.tensorboard), purge_step=step + 1 if step else None
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` (numbers) of `step`; the line is on disk when this returns.

        JSON knows no infinity: a number that is not finite is written as null, and not drawn.
        """
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"step": step, **{name: finite.get(name) for name in values}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in finite.items():
            self._tensorboard.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._tensorboard.close()


def read_metrics(jsonl: Path) -> list[dict[str, Any]]:
    """Read the lines of a `metrics.jsonl`, without a last line that a crash cut off.

    Raises:
        UserError: another line is no metrics of a step.
    """
    if not jsonl.exists():
        return []
    lines = []
    texts = jsonl.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
        elif number < len(texts):
            raise UserError(
                f"{jsonl}:{number}: is no line of metrics; move the file away, and the run begins "
                "a new one"
            )
    return lines
