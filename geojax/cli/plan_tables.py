"""Text and tables of `geojax plan`: the best layouts, why the first wins, and what would help."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rich.table import Table

from geojax.quantities import quantity

if TYPE_CHECKING:
    from geojax.models import AnyModel
    from geojax.planner.cost.layout import LayoutCandidate
    from geojax.planner.cost.prediction import Prediction
    from geojax.planner.search.fewer_sites import Without
    from geojax.planner.search.request import PlanRequest
    from geojax.planner.search.search import Candidate, SearchResult
    from geojax.planner.search.sensitivity import Gain
    from geojax.topology import Topology

_DAY = 86400.0
_LEAST_SHARE = 0.005
_LEAST_TERM = 0.02
_NAMED = 3
_GAP = 2


def question(
    model: "AnyModel",
    topology: "Topology | None",
    global_batch_size: int,
    sequence_length: int,
    precisions: "Sequence[str]",
) -> str:
    """Say what is planned."""
    from geojax.models import parameter_count

    where = "" if topology is None else f" on {_sites(topology)} ({topology.name})"
    return (
        f"{quantity(parameter_count(model))} parameters{where}, {global_batch_size} sequences "
        f"of {sequence_length} tokens a step, {' or '.join(precisions)}"
    )


def links(topology: "Topology") -> "list[str]":
    """Describe the links between sites, a line each."""
    return [
        f"{'-'.join(link.sites)}: {quantity(link.bytes_per_second, 'B/s')}, round trip "
        f"{link.round_trip_seconds * 1e3:.3g} ms"
        for link in topology.links
    ]


def _sites(topology: "Topology") -> str:
    """Say how many accelerators the sites have."""
    kinds = [f"{site.accelerators} {site.accelerator.name}" for site in topology.sites]
    if len(kinds) == 1:
        return f"one site of {kinds[0]}"
    if len(set(kinds)) == 1:
        return f"{len(kinds)} sites of {kinds[0]}"
    return " and ".join(
        f"{kind} in {site.name}" for kind, site in zip(kinds, topology.sites, strict=True)
    )


def searched(found: "SearchResult", seconds: float) -> str:
    """Say how many layouts were looked at, and what refused the others."""
    refused = ", ".join(f"{name} {count:,}" for name, count in found.refused.most_common())
    line = f"{found.fitting:,} layouts fit, {found.timed:,} of them were timed, in {seconds:.1f} s"
    if found.next_bound is not None:
        line += f"; no other can be below {found.next_bound:.4g} s"
    return f"{line}; refused: {refused}" if refused else line


def layouts_table(request: "PlanRequest", best: "Sequence[Candidate]") -> Table:
    """Tabulate the sizes and choices of the best layouts, a row each."""
    rows = []
    runs = all(each.layout.is_trainable for each in best)
    unlike = not runs or request.has_unlike_accelerators
    for each in best:
        layout, mesh = each.layout, each.layout.mesh
        pipeline, chunks = layout.pipeline_stages > 1, layout.pipeline.virtual_stages
        rows.append(
            {
                "role": layout.dc.role if mesh.dc > 1 else "",
                "join": layout.dc.join if layout.dc.join != "one_program" else "",
                "stages": layout.in_sites("stages", layout.pipeline_stages) if pipeline else "",
                "virtual": str(chunks) if chunks > 1 else "",
                "data": layout.in_sites("data", mesh.data),
                "expert": str(mesh.expert) if mesh.expert > 1 else "",
                "context": str(mesh.context) if mesh.context > 1 else "",
                "tensor": str(mesh.tensor),
                "schedule": layout.pipeline.schedule if pipeline else "",
                "ZeRO": f"{layout.zero.stage}{' across' if layout.zero.across_sites else ''}",
                "microbatches": f"{layout.written_microbatches} x {layout.microbatch_size}",
                "in proportion": in_proportion(layout) if unlike else "",
                "remat": layout.remat,
                "precision": layout.precision if len(request.precisions) > 1 else "",
                "sent as": layout.communication.gradient_compression.replace("none", ""),
                "geojax train": "" if runs else "runs" if layout.is_trainable else "plan only",
            }
        )
    return _table(rows)


def in_proportion(layout: "LayoutCandidate") -> str:
    """Write the layers or the sequences of each site where those were dealt out by speed."""
    if layout.site_shares is not None and layout.dc.role == "data":
        return "+".join(str(share.sequences) for share in layout.site_shares) + " sequences"
    if layout.pipeline.layers is None or layout.dc.role == "data":
        return ""
    layers = [0] * layout.mesh.dc
    for site, count in zip(layout.site_of_chunks, layout.pipeline.layers, strict=True):
        layers[site] += count
    return "+".join(map(str, layers)) + " layers"


def what_runs(request: "PlanRequest", best: "Sequence[Candidate]") -> str:
    """Say which layouts `geojax train` runs; "" where it runs all of them."""
    from geojax.planner.search.advice import what_would_run

    trainable = [row for row, each in enumerate(best, 1) if each.layout.is_trainable]
    if len(trainable) == len(best):
        return ""
    line = "plan only: geojax train needs the same mesh and as many sequences in each site; "
    if trainable:
        return f"{line}row {trainable[0]} is the fastest that it runs"
    return f"{line}{what_would_run(request.topology)}"


def figures_table(
    request: "PlanRequest", best: "Sequence[Candidate]", efficiencies: "Sequence[float]"
) -> Table:
    """Tabulate the predictions of the best layouts, a row each.

    Args:
        request: what is planned.
        best: the layouts.
        efficiencies: of each layout, against one site with all accelerators.
    """
    from geojax.planner.search.fit import rooms

    rows = []
    for each, efficiency in zip(best, efficiencies, strict=True):
        made, seconds = each.prediction, each.seconds
        cells = {
            "step": f"{seconds:.4g} s{_error(made)}",
            "MFU": _percent(made.model_flops_utilization),
            "memory": ", ".join(
                quantity(room.memory.bytes, "B") for room in rooms(request, each.layout)
            ),
            "bubble": _percent(made.bubble_fraction),
            "exposed comm": _percent(made.exposed_communication_seconds / seconds),
        }
        use = max(made.links, key=lambda link: link.bytes, default=None)
        if use is not None:
            cells |= {
                "of one site": _percent(efficiency),
                "over a link": quantity(use.bytes, "B"),
                "messages": f"{use.messages:,.0f}",
                "peak rate": quantity(use.peak_bytes_per_second, "B/s"),
            }
        rows.append(cells)
    return _table(rows)


def _table(rows: "Sequence[Mapping[str, str]]") -> Table:
    """Tabulate numbered rows, without the columns in which all cells are empty."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    total = len(str(len(rows))) + _GAP
    table.add_column("", justify="right", no_wrap=True, min_width=len(str(len(rows))))
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in names:
        width = max(len(name), *(len(row[name]) for row in rows))
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
        total += width + _GAP
    # Of a table that is wider than the terminal rich would leave out the narrow first column.
    table.width = total - _GAP
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), *(row[name] for name in names))
    return table


def plain_table(rows: "Sequence[Mapping[str, str]]", left: "Sequence[str]") -> Table:
    """Tabulate rows as wide as their cells, wherever they are printed.

    Args:
        rows: the cells of each row, by the titles of the columns.
        left: titles of the columns that are aligned to the left.
    """
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for name in rows[0] if rows else ():
        width = max(len(name), *(len(row[name]) for row in rows))
        justify: Literal["left", "right"] = "left" if name in left else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*row.values())
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _error(prediction: "Prediction") -> str:
    error = prediction.relative_error
    return "" if error is None else f" ±{error:.0%}"


def without(fewer: "Without", best: "Candidate") -> str:
    """Say what the best layout is faster or slower than the best without one of the sites."""
    saved = 1 - best.seconds / fewer.best.seconds
    compared = "saves" if saved >= 0 else "takes longer by"
    return (
        f"without {fewer.site}: {fewer.best.seconds:.4g} s ({fewer.best.layout}); row 1 {compared} "
        f"{abs(saved):.1%} of it"
    )


def why(best: "Candidate", second: "Candidate") -> str:
    """Say which terms make the first layout faster than the second."""
    first, other = _exposed(best.prediction), _exposed(second.prediction)
    saved = {name: other.get(name, 0.0) - first.get(name, 0.0) for name in other | first}
    ordered = sorted(saved.items(), key=lambda pair: -abs(pair[1]))
    shown = [
        f"{name} {-seconds:+.2g} s"
        for name, seconds in ordered[:_NAMED]
        if abs(seconds) > 1e-4 * best.seconds
    ]
    margin = second.seconds - best.seconds
    return f"1 before 2 by {margin:.2g} s ({margin / best.seconds:.1%}): {', '.join(shown)}"


def _exposed(prediction: "Prediction") -> dict[str, float]:
    seconds: dict[str, float] = {}
    for term in prediction.terms:
        seconds[term.name] = seconds.get(term.name, 0.0) + term.exposed_seconds
    return seconds


def limits(best: "Candidate", helps: "Sequence[Gain]") -> str:
    """Say what limits the best layout, and what would help it most."""
    from geojax.planner.search.sensitivity import BETTER

    shares = ", ".join(
        f"{gain.resource} {gain.share:.0%}" for gain in helps if gain.share >= _LEAST_SHARE
    )
    more = f"{BETTER - 1:.0%}"
    would = ", ".join(
        f"{gain.resource} {gain.seconds:.2g} s"
        for gain in helps[:_NAMED]
        if gain.share >= _LEAST_SHARE
    )
    return (
        f"row 1 is limited by {helps[0].resource} (share of the step's time: {shares}; of the "
        f"memory {best.memory.largest} take most)\n{more} more would save: {would}"
    )


def own_time(prediction: "Prediction") -> str:
    """Say how long the step of a config is, and which terms it is made of."""
    seconds = prediction.step_seconds
    exposed = sorted(_exposed(prediction).items(), key=lambda pair: -pair[1])
    shown = [(name, term) for name, term in exposed if term >= _LEAST_TERM * seconds]
    rest = seconds - sum(term for _, term in shown)
    terms = [f"{name} {term:.3g} s" for name, term in shown]
    terms += [f"the rest {rest:.2g} s"] if rest >= _LEAST_SHARE * seconds else []
    utilization = prediction.model_flops_utilization
    mfu = "" if utilization is None else f", {utilization:.1%} MFU"
    return f"{seconds:.4g} s{_error(prediction)} by the cost model{mfu}\nmade of {', '.join(terms)}"


def beside_own(own: "Prediction", best: "Candidate") -> str:
    """Say what the best layout saves of the step of the config."""
    saved = 1 - best.seconds / own.step_seconds
    if saved < _LEAST_SHARE:
        return f"no layout is faster than the config's own, {own.step_seconds:.4g} s"
    return f"row 1 saves {saved:.1%} of the {own.step_seconds:.4g} s of the config's own layout"


def pace(sizes: tuple[int, int], prediction: "Prediction", tokens: float | None) -> str:
    """Say how many tokens a day pass, how long a budget takes, and how sure that is.

    Args:
        sizes: sequences of a step, and tokens of a sequence.
        prediction: the step.
        tokens: the budget; None: there is none.
    """
    tokens_of_step = math.prod(sizes)
    daily = tokens_of_step / prediction.step_seconds * _DAY
    line = f"{quantity(tokens_of_step)} tokens a step, {quantity(daily)} a day"
    if tokens is not None:
        line += f"; {quantity(tokens)} tokens take {tokens / daily:.3g} days"
    error = prediction.relative_error
    if error is None:
        return f"{line}\nunvalidated: no published step of these accelerators was compared"
    return f"{line}\n±{error:.0%}: error that 90% of published steps of them keep within"


def terms(layout: "LayoutCandidate", prediction: "Prediction") -> str:
    """List the terms of a layout's step, with their sources."""
    lines = [str(layout)]
    for term in prediction.terms:
        line = f"{term.seconds:9.4g} s, {term.exposed_seconds:.4g} s exposed: {term.name}"
        if term.bytes:
            line += f", {quantity(term.bytes, 'B')}"
        if term.messages:
            line += f" in {term.messages:,.0f} messages"
        if term.network is not None:
            line += f" {term.network.replace('_', ' ')}"
        lines.append(f"{line} ({term.source})")
    return "\n".join([*lines, f"{prediction.step_seconds:9.4g} s: step, all that is exposed"])
