"""Draw docs/images/two-sites.svg: two sites, and what one step sends between them.

    python docs/images/two_sites.py

The figures are those of the preset `tiny` (5.77M parameters, fp32 gradients, two sites of four
devices), counted from the compiled step by `python benchmarks/traffic.py` and `benchmarks/wire.py`.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

SITE, DEVICE, SHARD, INK, LINK = "#eef3f8", "#ffffff", "#4c78a8", "#24292f", "#d9822b"
PALE = "#d5dde6"
DEVICES = 4
STEP = 0.98


def box(axes, x, y, width, height, **style):
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.1", **style)
    )


def device(axes, x, y, shard):
    """One device: its gradient as `DEVICES` blocks, of which it owns the one that is filled."""
    box(axes, x, y, 2.2, 0.72, facecolor=DEVICE, edgecolor=INK, linewidth=1)
    for block in range(DEVICES):
        color = SHARD if block == shard else PALE
        box(axes, x + 0.14 + 0.5 * block, y + 0.16, 0.42, 0.4, facecolor=color, linewidth=0)


def arrow(axes, start, end, color, width=1.6, style="<|-|>"):
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=11, color=color, lw=width)
    )


def main():
    figure, axes = pyplot.subplots(figsize=(10, 4.1))
    for name, left in (("site east", 0.0), ("site west", 8.6)):
        box(axes, left, 0, 4.4, 5.2, facecolor=SITE, edgecolor="#9fb3c8", linewidth=1)
        axes.text(left + 2.2, 4.83, name, ha="center", fontsize=12, weight="bold", color=INK)
        lane = left + (0.55 if left == 0 else 3.85)
        arrow(axes, (lane, 0.45), (lane, 4.3), INK, 2.6)
        label = left + (0.27 if left == 0 else 4.13)
        axes.text(
            label, 2.4, "reduce-scatter, all-gather", rotation=90, ha="center", va="center",
            fontsize=8.5, color=INK,
        )  # fmt: skip
        for shard in range(DEVICES):
            x = left + (1.2 if left == 0 else 1.0)
            device(axes, x, 3.6 - STEP * shard, shard)
    for shard in range(DEVICES):
        y = 3.96 - STEP * shard
        arrow(axes, (3.45, y), (9.55, y), LINK)
    axes.text(6.5, 4.83, "the long link", ha="center", fontsize=12, weight="bold", color=LINK)
    shares = "each device's share of the gradient,\nsummed over dc, once a step"
    axes.text(6.5, 3.47, shares, ha="center", va="center", fontsize=9.5, color=INK)
    axes.text(
        6.5, 2.49, "23.1 MB a site   (bf16 11.5, int8 5.9)", ha="center", va="center", fontsize=10,
        weight="bold", color=INK, bbox={"facecolor": "white", "edgecolor": LINK, "pad": 5},
    )  # fmt: skip
    axes.text(
        6.5, 1.51, "weights and optimizer state stay", ha="center", fontsize=9.5, color="#6a737d"
    )
    axes.set_xlim(-0.1, 13.1)
    axes.set_ylim(-0.1, 5.3)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    folder = Path(__file__).resolve().parent
    pyplot.rcParams["svg.hashsalt"] = "two-sites"
    figure.savefig(folder / "two-sites.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
