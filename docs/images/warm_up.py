"""Draw docs/images/warm-up.svg: 1F1B over a slow cut, and the same with extra warm-up forwards.

    python docs/images/warm_up.py

Both timelines come from the simulator: four stages, two in each site, eight microbatches, a forward
of 1, a backward of 2, and 3 for a message between the sites.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle

from geojax.pipeline import (
    Costs,
    Hop,
    Kind,
    Placement,
    Timeline,
    geopipe,
    one_forward_one_backward,
    simulate,
)

STAGES, MICROBATCHES = 4, 8
FORWARD, BACKWARD, CUT_LATENCY = 1.0, 2.0, 3.0
FORWARD_COLOR, BACKWARD_COLOR, EXTRA_COLOR = "#4c78a8", "#b5c7da", "#2f4b6b"
INK, LINK, IDLE = "#24292f", "#d9822b", "#f1f3f5"
ROW, SITE_GAP = 1.0, 0.7
IN_SITE = STAGES // 2


def top(stage: int) -> float:
    """Return the height of a stage's row, downwards."""
    return stage * ROW + (SITE_GAP if stage >= IN_SITE else 0.0)


def timelines() -> dict[str, Timeline]:
    """Simulate both schedules by the title of their panels."""

    def hop(source: int, target: int) -> Hop:
        crosses = (source < IN_SITE) != (target < IN_SITE)
        return Hop(latency=CUT_LATENCY, link="east-west") if crosses else Hop()

    placement = Placement.interleaved([IN_SITE, IN_SITE], 1)
    costs = Costs.of_stages(placement, FORWARD, BACKWARD, 0.0, hop)
    strict = simulate(one_forward_one_backward(STAGES, MICROBATCHES), costs)
    extra = simulate(geopipe(MICROBATCHES, costs), costs)
    return {
        f"1f1b: {strict.seconds:.0f} units, {max(strict.in_flight)} microbatches in flight": strict,
        f"geopipe: {extra.seconds:.0f} units, {max(extra.in_flight)} microbatches in flight": extra,
    }


def warm_up_forwards(timeline: Timeline) -> list[int]:
    """Count the forwards of each stage before its first backward."""
    return [
        next(count for count, action in enumerate(order) if action.kind is Kind.BACKWARD)
        for order in timeline.schedule.orders
    ]


def draw(axes, timeline: Timeline, plain: Timeline, title: str) -> None:
    """Draw one panel; forwards that `plain` does not have before its first backward are darker."""
    usual = warm_up_forwards(plain)
    warm_up = warm_up_forwards(timeline)
    for stage in range(STAGES):
        axes.add_patch(Rectangle((0, top(stage)), timeline.seconds, 0.86, color=IDLE, lw=0))
    for span in timeline.spans:
        number = span.action.microbatch
        color, ink = BACKWARD_COLOR, INK
        if span.action.kind is Kind.FORWARD:
            extra = usual[span.stage] <= number < warm_up[span.stage]
            color, ink = (EXTRA_COLOR if extra else FORWARD_COLOR), "white"
        box = Rectangle(
            (span.start, top(span.stage)), span.end - span.start, 0.86, facecolor=color,
            edgecolor="white", linewidth=0.8,
        )  # fmt: skip
        axes.add_patch(box)
        middle = (span.start + span.end) / 2, top(span.stage) + 0.44
        axes.text(*middle, str(number), ha="center", va="center", fontsize=7.5, color=ink)
    for message in timeline.messages:
        if message.link is None:
            continue
        down = message.target > message.source
        start = message.start, top(message.source) + (0.88 if down else -0.02)
        end = message.end, top(message.target) + (-0.02 if down else 0.88)
        axes.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=6, color=LINK, lw=0.8,
                            shrinkA=0, shrinkB=0)
        )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_ylim(top(STAGES - 1) + 0.95, -0.1)
    sites = ["east" if stage < IN_SITE else "west" for stage in range(STAGES)]
    labels = [f"{site}, stage {stage}" for stage, site in enumerate(sites)]
    axes.set_yticks([top(stage) + 0.43 for stage in range(STAGES)], labels)
    axes.tick_params(axis="both", length=0, labelsize=8.5, colors=INK)
    axes.spines[:].set_visible(False)
    axes.axvline(timeline.seconds, color=INK, linewidth=0.8)


def main() -> None:
    panels = timelines()
    plain = next(iter(panels.values()))
    longest = max(timeline.seconds for timeline in panels.values())
    figure, rows = pyplot.subplots(2, figsize=(10, 4.6), sharex=True)
    for axes, (title, timeline) in zip(rows, panels.items(), strict=True):
        draw(axes, timeline, plain, title)
    rows[0].set_xlim(0, longest)
    rows[0].tick_params(axis="x", labelbottom=False)
    rows[1].set_xlabel("time, in forwards of a stage", fontsize=8.5, color=INK)
    legend = [
        Rectangle((0, 0), 1, 1, color=FORWARD_COLOR, label="forward"),
        Rectangle((0, 0), 1, 1, color=EXTRA_COLOR, label="extra warm-up forward"),
        Rectangle((0, 0), 1, 1, color=BACKWARD_COLOR, label="backward"),
        Rectangle((0, 0), 1, 1, color=IDLE, label="idle"),
        matplotlib.lines.Line2D([], [], color=LINK, label="message between the sites"),
    ]
    figure.legend(
        handles=legend, loc="upper right", ncols=5, frameon=False, fontsize=8.5,
        bbox_to_anchor=(0.995, 1.0),
    )  # fmt: skip
    figure.subplots_adjust(left=0.1, right=0.99, top=0.88, bottom=0.1, hspace=0.25)
    pyplot.rcParams["svg.hashsalt"] = "warm-up"
    folder = Path(__file__).resolve().parent
    figure.savefig(folder / "warm-up.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
