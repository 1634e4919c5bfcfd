"""A bandwidth sweep as a picture: the steady period by bandwidth and memory limit."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

from geojax.pipeline.simulation.bandwidth import BandwidthSweep

_RATIOS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)


def draw_bandwidth(sweep: BandwidthSweep, links: Mapping[str, float]) -> Figure:
    """Periods as multiples of the busiest stage's work, and the bandwidth points on them.

    Args:
        sweep: what was simulated.
        links: the bandwidth of each link that there is, in bytes per second, by its name.
    """
    figure = Figure(figsize=(10, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    ratios = sweep.periods / sweep.work
    worst = min(max(float(np.max(ratios)), 1.3), 4.0)  # beyond, all is equally bad
    rows = range(len(sweep.memory_limits))
    shades = axes.pcolormesh(
        sweep.bandwidths, rows, ratios, norm=LogNorm(1.0, worst), cmap="YlOrRd", shading="nearest"
    )
    bar = figure.colorbar(
        shades, extend="max", label="time of a microbatch / work of the busiest stage"
    )
    bar.ax.yaxis.set_major_locator(FixedLocator([each for each in _RATIOS if each <= worst]))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    left, right = axes.get_xlim()
    axes.set_xscale("log")
    axes.set_xlim(max(left, sweep.bandwidths[0] ** 1.5 / sweep.bandwidths[1] ** 0.5), right)
    marks = (
        ("closed form", [point.closed_form for point in sweep.points], "D", "#1d4e79", 9),
        ("simulated", [point.simulated for point in sweep.points], "o", "white", 5),
    )
    for name, points, marker, color, size in marks:
        axes.plot(
            points,
            rows,
            marker,
            color=color,
            markersize=size,
            markeredgecolor="black",
            label=f"bandwidth point, {name}",
        )
    for name, bandwidth in links.items():
        _mark(axes, f"{name} {EngFormatter('B/s', places=1)(bandwidth)}", bandwidth)
    axes.set_yticks(rows, [str(limit) for limit in sweep.memory_limits])
    axes.xaxis.set_major_formatter(EngFormatter("B/s"))
    axes.set(xlabel="bandwidth of the links between sites", ylabel="microbatches in flight at most")
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    return figure


def _mark(axes: Axes, label: str, bandwidth: float) -> None:
    """Draw a line at a link's bandwidth, or an arrow at the edge if that is beyond it."""
    left, right = axes.get_xlim()
    if bandwidth > right:
        label += " →"
    elif bandwidth < left:
        label = f"← {label}"
    else:
        axes.axvline(bandwidth, color="#444444", linestyle=":", linewidth=1.2)
    rightmost = bandwidth > right / 2
    axes.annotate(
        label,
        (min(max(bandwidth, left), right), 1),
        xytext=(-4 if rightmost else 4, -4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if rightmost else "left",
        va="top",
        fontsize=8,
    )
