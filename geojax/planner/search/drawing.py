"""Pictures of a plan: roles over the links' properties, and one step of a layout."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from geojax.planner.cost.prediction import Prediction
from geojax.planner.search.sensitivity import Sweep

COLORS = {"data": "#1d4e79", "stage": "#c05a1c"}
"""Color of each role."""

COMPUTE, MESSAGES, IDLE = "#4c7fb0", "#c05a1c", "#9a9a9a"
"""Colors of the terms of a step."""

UNITS = {"bandwidth": "B/s", "round trip": "s"}
"""Unit of each property of the links."""


def save_sweeps(sweeps: tuple[Sweep, ...], image: Path) -> None:
    """Draw the step time of each role over each property of the links, crossings marked."""
    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(sweeps), sharey=True)
    for axes, sweep in zip(panels, sweeps, strict=True):
        _draw_sweep(axes, sweep)
    _label_seconds(panels[0])
    panels[0].legend(frameon=False)
    figure.suptitle(
        "fastest of the best layouts of each role, if links were others",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    figure.savefig(image)


def _label_seconds(axes: Axes) -> None:
    """Label the axis of step times, of which both panels have the same."""
    low, high = axes.get_ylim()
    narrow = high < 10 * low
    axes.yaxis.set_major_locator(
        MaxNLocator(8, steps=[1, 2, 5, 10]) if narrow else LogLocator(subs=(1.0, 2.0, 5.0))
    )
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("time of a step")


def _draw_sweep(axes: Axes, sweep: Sweep) -> None:
    unit = EngFormatter(UNITS[sweep.quantity], places=1)
    for role, seconds in sweep.seconds.items():
        axes.plot(
            sweep.values, seconds, "o-", markersize=3, color=COLORS[role], label=f"dc.role {role}"
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(UNITS[sweep.quantity]))
    axes.set_xlabel(f"{sweep.quantity} of the links between sites")
    axes.axvline(sweep.now, color="#444444", linestyle=":", linewidth=1.2)
    axes.annotate(
        f"topology\n{unit(sweep.now)}",
        (sweep.now, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    for place, value in enumerate(sweep.crossings):
        axes.axvline(value, color="#2f7d32", linestyle="--", linewidth=1.0)
        axes.annotate(
            f"crossing\n{unit(value)}",
            (value, 0.75 - 0.12 * (place % 3)),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 0) if value < sweep.now else (4, 0),
            textcoords="offset points",
            ha="right" if value < sweep.now else "left",
            color="#2f7d32",
            fontsize=8,
        )


def save_terms(prediction: Prediction, title: str, image: Path) -> None:
    """Draw the exposed terms of a step one after the other, hidden parts before them in outline."""
    terms = [term for term in prediction.terms if term.seconds > 1e-3 * prediction.step_seconds]
    figure = Figure(figsize=(11, 1.1 + 0.32 * len(terms)), dpi=120, layout="constrained")
    axes = figure.subplots()
    start = 0.0
    for row, term in enumerate(terms):
        color = COMPUTE if term.network is None else MESSAGES
        color = IDLE if term.name == "pipeline bubble" else color
        axes.barh(row, term.exposed_seconds, left=start, color=color, height=0.7)
        hidden = term.seconds - term.exposed_seconds
        before = min(hidden, start)  # several messages may travel at a time
        if before > 0:
            axes.barh(row, before, left=start - before, fill=False, edgecolor=color, height=0.7)
        if hidden > before:
            label = f"{EngFormatter('s', places=1)(term.seconds)} of messages, several at a time"
            axes.text(start - before / 2, row, label, ha="center", va="center", fontsize=8)
        start += term.exposed_seconds
    axes.set_yticks(range(len(terms)), [term.name for term in terms])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * prediction.step_seconds)
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.set_xlabel("time of a step")
    axes.legend(
        handles=[
            Patch(color=COMPUTE, label="compute and memory"),
            Patch(color=MESSAGES, label="messages"),
            Patch(color=IDLE, label="idle"),
            Patch(fill=False, edgecolor="#444444", label="hidden behind other work"),
        ],
        frameon=False,
        fontsize=8,
        loc="lower left",
    )
    axes.set_title(title, fontsize=9, loc="left")
    figure.savefig(image)
