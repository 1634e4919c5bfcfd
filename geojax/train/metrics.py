"""Metrics of a run on disk: one JSON line a step, and TensorBoard."""

import json
import math
from pathlib import Path
from typing import Any, Self

from tensorboardX import SummaryWriter

from geojax.checkpoint import RunDirectory


class MetricsWriter:
    """A writer of `metrics.jsonl` and a TensorBoard log, on one process of a run.

    A resumed run continues the file: lines of steps after the restored one, which the interrupted
    run still wrote, are dropped, so that every step stands in the file once.
    """

    def __init__(self, directory: RunDirectory, step: int):
        jsonl = directory.metrics
        kept = [line for line in read_metrics(jsonl) if step and line["step"] <= step]
        temporary = jsonl.with_suffix(".partial")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(jsonl)
        self._file = jsonl.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(
            str(directory.tensorboard), purge_step=step + 1 if step else None
        )

    def write(self, step: int, values: dict[str, float]) -> None:
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
    """Read the lines of a `metrics.jsonl`, without a last line that a crash cut off."""
    if not jsonl.exists():
        return []
    lines = []
    for text in jsonl.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
