"""The table and the chart of what was measured."""

import statistics
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

COLORS = {"geojax": "#1f77b4", "jit": "#2ca02c", "PyTorch": "#d95f02"}

SIMULATED = "tokens_per_second_simulated"
RELAY = "relay_processor_seconds_per_step"


def fastest(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each contestant the variant with the most tokens/s over the link, in the given order."""
    best: dict[str, dict[str, Any]] = {}
    for cell in cells:
        name = cell["name"]
        if name not in best or cell["tokens_per_second"] > best[name]["tokens_per_second"]:
            best[name] = cell
    return list(best.values())


def table(title: str, cells: list[dict[str, Any]]) -> Table:
    """One row of the benchmark, a line for each contestant."""
    made = Table(title=title, title_justify="left", box=rich.box.HORIZONTALS)
    made.add_column("sites are", no_wrap=True)
    made.add_column("contestant")  # the only one that a narrow terminal wraps
    for heading in (
        "tokens/s",
        "\nunshaped",
        "effi-\nciency",
        "its\nbound",
        "simu-\nlated",
        "waits s\na step",
        "CPU s\na step",
        "relay s\na step",
        "MB over\nthe link",
        "/ for-\nmula",
        "third\nloss",
    ):
        made.add_column(heading, justify="right", no_wrap=True)
    for cell in cells:
        megabytes = sum(cell["sent_bytes_per_step"]) / 1e6
        made.add_row(
            cell["role"],
            cell["name"] + (f" ({cell['variant']})" if cell["variant"] else ""),
            f"{cell['tokens_per_second']:.0f}",
            f"{cell['tokens_per_second_unshaped']:.0f}",
            f"{cell['efficiency']:.2f}",
            f"{cell['bound']:.2f}" if "bound" in cell else "",
            f"{cell[SIMULATED]:.0f}" if SIMULATED in cell else "",
            "" if (waited := waited_seconds(cell)) is None else f"{waited:.2f}",
            _processor_seconds(cell),
            f"{cell[RELAY]:.2f}" if RELAY in cell else "",
            f"{megabytes:.1f}",
            f"{cell['counted_over_formula']:.3f}",
            f"{cell['losses'][-1]:.4f}",
        )
    return made


def waited_seconds(cell: dict[str, Any]) -> float | None:
    """Seconds for which devices waited in a step over the long link; None: nobody says it.

    The mean of the sites, and the least of the rounds.
    """
    if "wait_seconds_of_sites" not in cell:
        return None
    rounds = cell["wait_seconds_of_sites"]["link"]
    return min(statistics.fmean(sum(site.values()) for site in sites) for sites in rounds)


def _processor_seconds(cell: dict[str, Any]) -> str:
    """What a process computes in an unshaped step; it hardly depends on other work."""
    measured = cell.get("processor_seconds_per_step")
    return f"{min(measured['plain']):.2f}" if measured else ""


def show(console: Console, rows: dict[str, list[dict[str, Any]]]) -> None:
    """All rows of the benchmark."""
    for title, cells in rows.items():
        console.print(table(title, fastest(cells)))


def draw(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Efficiencies as bars, a panel for each row of the benchmark, with tokens/s beside them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {title: fastest(cells) for title, cells in rows.items() if cells}
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    tallest = max(len(cells) for cells in shown.values())
    figure, panels = plt.subplots(
        lines,
        columns,
        figsize=(6.6 * columns, 0.9 + 0.29 * tallest * lines),
        squeeze=False,
        layout="constrained",
    )
    for panel in panels.flat[len(shown) :]:
        panel.remove()
    for panel, (title, cells) in zip(panels.flat, shown.items(), strict=False):
        _draw_row(panel, title, cells)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_row(panel: Any, title: str, cells: list[dict[str, Any]]) -> None:
    gap = 0.6  # between sites that are replicas and sites that are stages
    roles = [cell["role"] for cell in cells]
    places = [index + gap * (role == "stage") for index, role in enumerate(roles)]
    panel.barh(
        places,
        [cell["efficiency"] for cell in cells],
        color=[COLORS[cell["name"].split()[0].strip(",")] for cell in cells],
        hatch=["" if role == "data" else "//" for role in roles],
        edgecolor="white",
    )
    for place, cell in zip(places, cells, strict=True):
        efficiency, speed = cell["efficiency"], f"{cell['tokens_per_second']:.0f} tokens/s"
        panel.text(efficiency + 0.015, place, f"{efficiency:.2f}", va="center", fontsize=8)
        panel.text(1.44, place, speed, va="center", ha="right", fontsize=8)
    panel.set_yticks(places, [cell["name"] for cell in cells], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.45)
    panel.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    panel.axvline(1.0, color="#888888", linewidth=0.8, zorder=0)
    panel.set_xlabel("efficiency: throughput over the link / over an unshaped one", fontsize=8)
    panel.set_title(f"{title}; hatched: sites are stages", fontsize=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
