"""Draw docs/images/islands-ports.svg: which connections cross between two islands, at which ports.

    python docs/images/islands_ports.py

The ports are those of the files in launch/; docs/networks.md lists all connections.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

SITE, BOX, INK, LINK, GRAY = "#eef3f8", "#ffffff", "#24292f", "#d9822b", "#6a737d"
WIDTH = 13.0


def box(axes, x, y, width, height, **style):
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.1", **style)
    )


def labeled(axes, x, y, width, title, note, color):
    box(axes, x, y, width, 0.95, facecolor=color, edgecolor=INK, linewidth=1)
    axes.text(x + width / 2, y + 0.61, title, ha="center", va="center", fontsize=10, color=INK)
    axes.text(x + width / 2, y + 0.27, note, ha="center", va="center", fontsize=9, color=GRAY)


def arrow(axes, start, end, color, style="<|-|>", **line):
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle=style, mutation_scale=12, color=color, shrinkA=0, shrinkB=0,
            **line,
        )
    )  # fmt: skip


def site(axes, name, mirrored):
    """One site, and the ports of its processes at the edge towards the link."""

    def left(x, width):
        return WIDTH - x - width if mirrored else x

    box(axes, left(0, 5.1), 0, 5.1, 5.4, facecolor=SITE, edgecolor="#9fb3c8", linewidth=1)
    center = left(0, 5.1) + 2.55
    axes.text(center, 5.05, f"site {name}", ha="center", fontsize=12, weight="bold", color=INK)
    for process, y in ((0, 2.5), (1, 0.5)):
        labeled(axes, left(0.3, 4.5), y, 4.5, f"process {process}", f"port {61400 + process}", BOX)
    middle = left(1.35, 0)
    arrow(axes, (middle, 1.45), (middle, 2.5), INK, lw=1.4)
    axes.text(
        middle + (-0.15 if mirrored else 0.15), 1.97,
        "NCCL or Gloo, any port;\nprocess 0: port 61440",
        ha="right" if mirrored else "left", va="center", fontsize=8.5, color=GRAY,
    )  # fmt: skip


def main():
    figure, axes = pyplot.subplots(figsize=(10, 4.3))
    site(axes, "east", mirrored=False)
    site(axes, "west", mirrored=True)
    labeled(axes, 0.3, 3.8, 4.5, "process 0: rendezvous", "port 61439", BOX)
    arrow(axes, (7.9, 4.27), (4.8, 4.27), LINK, style="-|>", lw=1.6, linestyle=(0, (4, 3)))
    axes.text(6.5, 4.42, "process 0 of each site, at the start", ha="center", fontsize=9, color=INK)
    axes.text(6.5, 5.05, "the long link", ha="center", fontsize=12, weight="bold", color=LINK)
    for y in (2.97, 0.97):
        arrow(axes, (4.8, y), (8.2, y), LINK, lw=2.2)
    axes.text(
        6.5, 1.97, "data, heartbeats,\nacknowledgments;\nboth sides connect", ha="center",
        va="center", fontsize=9, color=INK,
    )  # fmt: skip
    axes.set_xlim(-0.1, WIDTH + 0.1)
    axes.set_ylim(-0.1, 5.5)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    folder = Path(__file__).resolve().parent
    pyplot.rcParams["svg.hashsalt"] = "islands-ports"
    figure.savefig(folder / "islands-ports.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
