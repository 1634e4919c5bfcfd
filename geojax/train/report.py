"""The terminal output of a run: start-up lines, progress bar, loss curve and summary."""

import collections
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import rich.console
import rich.progress
import rich.table

from geojax.quantities import duration
from geojax.saved_runs.records.smoothing import smooth
from geojax.train.metrics import read_metrics

_PACE_STEPS = 20
"""Steps whose pace tells the time that is left."""


class Progress:
    """A progress bar with the newest figures of the run, on the screen while it is entered."""

    def __init__(
        self, console: rich.console.Console, steps: int, done: int, consumed: int, end: int
    ):
        """Show a run of `steps` steps, of which some are done.

        The time that is left follows from sequences, since steps may grow (`batch.ramp`).

        Args:
            console: the terminal, or a log.
            steps: those of the whole run.
            done: those before.
            consumed: sequences that these consumed.
            end: sequences that all steps will have consumed.
        """
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step {task.fields[step]}/{task.fields[steps]}"),
            rich.progress.BarColumn(bar_width=18),
            rich.progress.TextColumn("{task.fields[figures]}"),
            rich.progress.TimeRemainingColumn(compact=True),
            console=console,
            # Without a terminal a bar would fill the log: there, `log` prints a line now and then.
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "training", total=end, completed=consumed, step=done, steps=steps, figures=""
        )
        self._console = console
        self._steps = steps
        self._stride = max(1, steps // 50)
        self._is_first = True
        self._end = end
        self._marks = collections.deque([(time.monotonic(), consumed)], maxlen=_PACE_STEPS)
        """Times of the last steps, and the sequences consumed by then."""

    def update(self, step: int, consumed: int, words: Sequence[str]) -> None:
        """Show the figures of `step`, after which so many sequences are consumed."""
        text = "  ".join(words)
        self._bar.update(self._task, completed=consumed, step=step, figures=text)
        self._marks.append((time.monotonic(), consumed))
        # The first step tells a supervisor that this start has come further than those before.
        is_shown = self._is_first or step % self._stride == 0 or step == self._steps
        self._is_first = False
        if not self._console.is_terminal and is_shown:
            self._console.print(f"step {step}/{self._steps}  {text}{self._left(consumed)}")

    def _left(self, consumed: int) -> str:
        """Return the time that is left at the pace of the last steps; nothing at the end."""
        began, before = self._marks[0]
        if consumed >= self._end or consumed <= before:
            return ""
        seconds = (time.monotonic() - began) * (self._end - consumed) / (consumed - before)
        return f"  {duration(seconds)} left"

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def mesh_line(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> str:
    """Name the axes of a mesh that are in use, and the devices that there are.

    Example:
        >>> mesh_line({"dc": 2, "data": 4, "tensor": 1}, jax.devices())  # doctest: +SKIP
        'dc=2 x data=4 on 8 cpu devices'
    """
    used = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    device, count = devices[0], len(devices)
    kind = device.platform
    if device.device_kind != device.platform:
        kind += f" ({device.device_kind})"
    shown = f"{count} {kind} device{'s' if count > 1 else ''}"
    return f"{used} on {shown}" if used else shown


def draw_loss_curve(metrics: Path, image: Path) -> None:
    """Draw training and validation loss by step from a `metrics.jsonl` into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    training, validation = [], collections.defaultdict(list)
    for line in read_metrics(metrics):
        if line.get("loss") is not None:
            training.append((line["step"], line["loss"]))
        for name, value in line.items():
            if name.startswith("validation/") and value is not None:
                validation[name].append((line["step"], value))
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    if training:
        steps, losses = zip(*training, strict=True)
        axes.plot(steps, losses, color="#9bb8d3", linewidth=0.8, label="training")
        axes.plot(steps, smooth(losses), color="#1f5a94", linewidth=1.8, label="training, smoothed")
    colors = ("#d1495b", "#edae49", "#66a182", "#6d597a")
    for (name, points), color in zip(sorted(validation.items()), colors, strict=False):
        label = f"{name.replace('/', ' ')}, at last {points[-1][1]:.3f}"
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=5, label=label)
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(image)
    pyplot.close(figure)


def summary_table(title: str, entries: Mapping[str, Any]) -> rich.table.Table:
    """Make the one-screen summary at the end of a run."""
    table = rich.table.Table(title=title, show_header=False, title_justify="left", box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in entries.items():
        table.add_row(name, str(value))
    return table
