"""Draw docs/images/rooms.svg: the packages of geojax, and the way of a batch through them.

python docs/images/rooms.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FLOORS = (
    ("commands", (("cli", "one module a subcommand"), ("trainer", "a run from Python"))),
    (
        "runs",
        (
            ("train", "trainer, loop, metrics"),
            ("planner", "resolves, predicts, searches"),
            ("probe", "measures devices and links"),
            ("inference", "writes and scores text"),
            ("saved_runs", "serves and exports runs"),
        ),
    ),
    (
        "one step",
        (
            ("step", "gather, gradients, update"),
            ("islands", "a site's walk and programs"),
            ("pipeline", "schedules, executor"),
            ("checkpoint", "saves per site, restores"),
            ("config", "YAML, layout, limits"),
        ),
    ),
    (
        "parts",
        (
            ("models", "blocks, families, chunks"),
            ("optim", "optax chains on shards"),
            ("precision", "dtypes, FP8 recipes"),
            ("collectives", "sums in and between sites"),
            ("data", "tokens, packing, order"),
            ("sharding", "shards of each leaf"),
            ("hlo", "reads compiled programs"),
        ),
    ),
    (
        "ground",
        (
            ("transport", "arrays between runtimes"),
            ("runtime", "start, watch, flags"),
            ("launch", "starts processes"),
            ("mesh, topology", "axes, sites, links"),
            ("wan", "an emulated link"),
        ),
    ),
)
WAY = ("data", "train", "step", "models", "collectives", "optim")
"""Rooms that a batch passes, in order."""
FLOOR, ROOM, PASSED, INK, STEP = "#eef3f8", "#ffffff", "#dbe8f5", "#24292f", "#d9822b"
WIDTH, HEIGHT, LABEL = 16.0, 1.6, 1.6


def box(axes, x, y, width, height, **style):
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.1", **style)
    )


def main():
    figure, axes = pyplot.subplots(figsize=(11, 5.6))
    for number, (title, rooms) in enumerate(FLOORS):
        y = (len(FLOORS) - 1 - number) * (HEIGHT + 0.35)
        box(axes, 0, y, WIDTH, HEIGHT, facecolor=FLOOR, edgecolor="#9fb3c8", linewidth=1)
        axes.text(0.2, y + HEIGHT / 2, title, va="center", fontsize=10, weight="bold", color=INK)
        width = (WIDTH - LABEL - 0.2) / len(rooms)
        for index, (room, says) in enumerate(rooms):
            x = LABEL + index * width
            color = PASSED if room in WAY else ROOM
            box(
                axes, x + 0.06, y + 0.25, width - 0.12, HEIGHT - 0.5, facecolor=color, edgecolor=INK
            )
            middle = x + width / 2
            axes.text(middle, y + 0.98, room, ha="center", va="center", fontsize=10, color=INK)
            axes.text(middle, y + 0.55, says, ha="center", va="center", fontsize=6.6, color=INK)
            if room in WAY:
                axes.text(
                    x + 0.24,
                    y + HEIGHT - 0.27,
                    str(WAY.index(room) + 1),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white",
                    bbox={"boxstyle": "circle,pad=0.2", "facecolor": STEP, "edgecolor": "none"},
                )
    top = len(FLOORS) * (HEIGHT + 0.35)
    axes.add_patch(
        FancyArrowPatch(
            (WIDTH + 0.45, top - 0.4),
            (WIDTH + 0.45, 0.1),
            arrowstyle="-|>",
            mutation_scale=14,
            color=INK,
        )
    )
    axes.text(WIDTH + 0.7, top / 2, "imports", rotation=270, va="center", fontsize=9, color=INK)
    axes.set_xlim(-0.1, WIDTH + 1.2)
    axes.set_ylim(-0.1, top)
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    pyplot.rcParams["svg.hashsalt"] = "rooms"
    figure.savefig(Path(__file__).with_name("rooms.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
