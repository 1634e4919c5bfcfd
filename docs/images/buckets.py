"""Draw docs/images/buckets.svg: gradients summed over two sites, bucket by bucket, on a time axis.

    python docs/images/buckets.py

An illustration with round numbers, not a measurement: four buckets, each with 3 units of backward
pass, 1 of reduce-scatter inside the sites and 2.5 of sum over the link. With overlap a bucket takes
the steps of `geojax.step.grad_sinks`: each begins with the backward pass of a later bucket.
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Rectangle

BUCKETS = 4
BACKWARD, SCATTER, LINK_SUM, UPDATE = 3.0, 1.0, 2.5, 1.4
LANES = ("compute", "inside each site", "over the link")
SHADES = ("#2f4b6b", "#4c78a8", "#7d9fc4", "#b5c7da")
INK, EXPOSED, IDLE, UPDATE_COLOR = "#24292f", "#d9822b", "#f1f3f5", "#8f8f8f"


class Work(NamedTuple):
    """A bar of a lane."""

    lane: int
    start: float
    seconds: float
    text: str
    color: str


def steps(overlap: bool) -> list[Work]:
    """Return the work of a step, the gradients of the last layers first."""
    loop_end = BUCKETS * BACKWARD
    work, network_free, link_free = [], 0.0, 0.0
    for bucket in range(BUCKETS):
        color = SHADES[bucket]
        computed = (bucket + 1) * BACKWARD
        scatter = max(network_free, computed if overlap else loop_end)
        # In the loop a sum begins with the backward pass after the one beside its reduce-scatter.
        begun = min(computed + BACKWARD, loop_end) if overlap else loop_end
        send = max(link_free, scatter + SCATTER, begun)
        network_free, link_free = scatter + SCATTER, send + LINK_SUM
        work += [
            Work(0, bucket * BACKWARD, BACKWARD, f"backward {bucket + 1}", color),
            Work(1, scatter, SCATTER, f"RS {bucket + 1}", color),
            Work(2, send, LINK_SUM, f"sum {bucket + 1}", color),
        ]
    return [*work, Work(0, link_free, UPDATE, "update", UPDATE_COLOR)]


def draw(axes, work: list[Work], title: str) -> None:
    end = max(each.start + each.seconds for each in work)
    loop_end, update = BUCKETS * BACKWARD, end - UPDATE
    for lane in range(len(LANES)):
        axes.add_patch(Rectangle((0, lane), end, 0.8, color=IDLE, lw=0))
    for each in work:
        axes.add_patch(
            Rectangle(
                (each.start, each.lane), each.seconds, 0.8, facecolor=each.color,
                edgecolor="white", linewidth=1,
            )
        )  # fmt: skip
        ink = INK if each.color == SHADES[-1] else "white"
        middle = each.start + each.seconds / 2, each.lane + 0.41
        axes.text(*middle, each.text, ha="center", va="center", fontsize=8.5, color=ink)
    axes.annotate(
        "", (loop_end, 0.4), (update, 0.4),
        arrowprops={"arrowstyle": "<|-|>", "color": EXPOSED, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip
    axes.text(
        (loop_end + update) / 2, 0.4, f"exposed: {update - loop_end:g}", ha="center", va="center",
        fontsize=9, weight="bold", color=EXPOSED, bbox={"facecolor": IDLE, "lw": 0, "pad": 2},
    )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_ylim(len(LANES) - 0.1, -0.1)
    axes.set_yticks([lane + 0.4 for lane in range(len(LANES))], LANES)
    axes.tick_params(axis="both", length=0, labelsize=9, colors=INK)
    axes.spines[:].set_visible(False)


def main() -> None:
    figure, rows = pyplot.subplots(2, figsize=(10, 3.9), sharex=True)
    for axes, overlap in zip(rows, (False, True), strict=True):
        when = "under the backward pass" if overlap else "after the backward pass"
        draw(axes, steps(overlap), f"overlap_grad_reduce: {str(overlap).lower()} ({when})")
    rows[0].tick_params(axis="x", labelbottom=False)
    rows[0].set_xlim(0, max(each.start + each.seconds for each in steps(overlap=False)))
    rows[1].set_xlabel(
        "time, the same in both sites (RS: reduce-scatter; an illustration, not a measurement)",
        fontsize=9,
        color=INK,
    )
    figure.subplots_adjust(left=0.11, right=0.99, top=0.93, bottom=0.12, hspace=0.3)
    pyplot.rcParams["svg.hashsalt"] = "buckets"
    folder = Path(__file__).resolve().parent
    figure.savefig(folder / "buckets.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
