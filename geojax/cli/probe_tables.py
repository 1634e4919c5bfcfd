"""Tables of `geojax probe`, one for each check."""

import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from geojax.probe.figures import CollectiveFigures, DeviceFigures, Figures, HostFigures
from geojax.quantities import quantity

_DEVICES_SHOWN = 16
_WIDTH = 120


def show(figures: Figures, console: Console) -> None:
    """Print a table with verdicts for every check that was run."""
    console.width = max(console.width, _WIDTH)  # a wrapped line is better than a cut one
    if figures.devices:
        console.print(_devices(figures.devices, figures.dtype))
    if figures.collectives:
        console.print(_collectives(figures))
    if figures.links:
        console.print(_links(figures))
    if figures.hosts:
        console.print(_hosts(figures.hosts))
        for line in dict.fromkeys(line for host in figures.hosts for line in host.advice):
            console.print(line)
    if figures.stage_times is not None:
        console.print(_stages(figures))


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    return table


def _devices(devices: Sequence[DeviceFigures], dtype: str) -> Table:
    """Make a row for each device; of many only the slowest, below a row of medians."""
    table = _table(
        f"devices: matrix products in {dtype}, memory read and written",
        ("device", "site", "host", "process"),
        ("products", "memory"),
    )
    shown = list(devices)
    if len(shown) > _DEVICES_SHOWN:
        shown = sorted(shown, key=lambda each: (each.verdict == "ok", each.flops_per_second))[
            :_DEVICES_SHOWN
        ]
        flops = statistics.median(each.flops_per_second for each in devices)
        moved = statistics.median(each.bytes_per_second for each in devices)
        rates = (quantity(flops, "FLOP/s"), quantity(moved, "B/s"))
        table.add_row(f"median of {len(devices)}", "", "", "", *rates, "")
    for each in shown:
        table.add_row(
            str(each.device),
            each.site,
            each.host,
            str(each.process),
            quantity(each.flops_per_second, "FLOP/s"),
            quantity(each.bytes_per_second, "B/s"),
            each.verdict,
        )
    return table


def _collectives(figures: Figures) -> Table:
    """Make a table of bus bandwidth by message size, and the round trip of a small message."""
    sizes = sorted({size for each in figures.collectives for size in each.bus_bytes_per_second})
    trips = {(each.site, each.scope): each.round_trip_seconds for each in figures.networks}
    table = _table(
        "networks inside the sites: bus bandwidth of a message of",
        ("site", "network", "collective"),
        (*(quantity(size, "B") for size in sizes), "round trip"),
    )
    for each in figures.collectives:
        rates = (quantity(each.bus_bytes_per_second[size], "B/s") for size in sizes)
        trip = _time(trips[each.site, each.scope])
        table.add_row(each.site, _network(each), each.collective, *rates, trip, each.verdict)
    return table


def _network(each: CollectiveFigures) -> str:
    return f"{each.scope}, {each.devices} devices"


def _links(figures: Figures) -> Table:
    streams = sorted({count for link in figures.links for count in link.bytes_per_second})
    table = _table(
        "links between sites: payload by the number of TCP streams; the best one with headers",
        ("from", "to"),
        ("round trip", *(str(count) for count in streams), "with headers"),
    )
    for link in figures.links:
        table.add_row(
            link.source,
            link.target,
            _time(link.round_trip_seconds),
            *(_bits(link.bytes_per_second[count]) for count in streams),
            _bits(link.best / link.packet_share),
            link.verdict,
        )
    return table


def _hosts(hosts: Sequence[HostFigures]) -> Table:
    """Make a row for the hosts of a site that have the same settings."""
    table = _table(
        "hosts: what a TCP stream may have",
        ("site", "hosts", "congestion control", "slow start after idle"),
        ("send buffer", "receive buffer"),
    )
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in hosts:
        row = (
            each.site,
            each.congestion_control,
            "yes" if each.slow_start_after_idle else "no",
            quantity(each.send_buffer_bytes, "B"),
            quantity(each.receive_buffer_bytes, "B"),
            each.verdict,
        )
        rows.setdefault(row, []).append(each.host)
    for (site, *rest), names in rows.items():
        table.add_row(site, names[0] if len(names) == 1 else f"{len(names)} hosts", *rest)
    return table


def _stages(figures: Figures) -> Table:
    times = figures.stage_times
    assert times is not None, "the stage times must have been measured"
    table = Table(
        title=f"pieces of the model: {times.sequences} x {times.sequence_length} tokens of a "
        f"microbatch in {times.dtype}, remat {times.remat}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    for name in ("site", "piece"):
        table.add_column(name, no_wrap=True)
    for name in ("forward", "gradient of input", "gradient of weights"):
        table.add_column(name, justify="right", no_wrap=True)
    for site in times.sites:
        pieces = {"a layer": site.layer, "embedding": site.embedding, "head and loss": site.head}
        for name, piece in pieces.items():
            table.add_row(site.name, name, *_times(piece.kinds))
        if site.layer_whole_backward:
            whole = f"{_time(site.layer_whole_backward)} for both in one go"
            table.add_row(site.name, "a layer, not split", "-", whole, "-")
    return table


def _times(seconds: Iterable[float]) -> list[str]:
    return [_time(each) if each else "-" for each in seconds]


def _time(seconds: float) -> str:
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
        if seconds >= scale or unit == "us"
    )
    return f"{seconds / scale:.3g} {unit}"


def _bits(bytes_per_second: float) -> str:
    return quantity(8 * bytes_per_second, "bit/s")
