"""`geojax wan up` and its like: an emulated long link between sites on this machine."""

import dataclasses

import pydantic
from rich.console import Console
from rich.table import Table

from geojax.exit_codes import UNHEALTHY
from geojax.quantities import Bytes, BytesPerSecond, Seconds, Share
from geojax.settings import Settings, validate
from geojax.wan import (
    EmulatedWan,
    WanSettings,
    ailments,
    bring_up,
    congestion_control,
    cut,
    is_cut,
    mend,
    take_down,
    traffic,
)
from geojax.wan.settings import LARGEST_SEGMENT, MTU


@dataclasses.dataclass(frozen=True)
class WanUpCommand:
    """Join sites on this machine by emulated long links, for commands that run in them.

    Each site is a network namespace; between each two there is a link. Without options the links
    are as fast as the kernel is. Round trip and throughput are measured and shown. Needs root.
    `ip netns exec geojax.wan.east COMMAND` runs a command in the site east.
    """

    sites: int = 2
    """Number of sites: east, west, north, south."""

    rtt: str = "0ms"
    """Round trip of a link, such as 21ms."""

    rate: str | None = None
    """Bandwidth of a link in each direction, such as 1gbit or 200mbit, counted in IP packets with
    their headers; default: no limit."""

    loss: str = "0"
    """Share of the packets that gets lost, such as 0.1%."""

    jitter: str = "0ms"
    """By how much a packet's delay differs from half the round trip at most; order is kept."""

    queue: str | None = None
    """What waits for a link at most, such as 4MiB; default: bandwidth-delay product and 1 MiB."""

    core: int | None = None
    """The core that carries the packets where the kernel has no netem; default: the last one."""

    name: str = "wan"
    """Tells this emulated network from others on this machine."""


@dataclasses.dataclass(frozen=True)
class WanDownCommand:
    """Remove an emulated network, or what a crash has left of it. Needs root."""

    name: str = "wan"
    """What it was called at `geojax wan up`."""


@dataclasses.dataclass(frozen=True)
class WanStatusCommand:
    """Show an emulated network: what was asked, what was measured, and what has crossed it."""

    name: str = "wan"
    """What it was called at `geojax wan up`."""


@dataclasses.dataclass(frozen=True)
class WanCutCommand:
    """Let nothing cross a link any more, as if somebody had dug up the fibre. Needs root."""

    link: str | None = None
    """Which link, such as east-west; default: all of them."""

    name: str = "wan"
    """What the network was called at `geojax wan up`."""


@dataclasses.dataclass(frozen=True)
class WanMendCommand:
    """Let links that were cut carry packets again. Needs root."""

    link: str | None = None
    """Which link, such as east-west; default: all of them."""

    name: str = "wan"
    """What the network was called at `geojax wan up`."""


WanCommand = WanUpCommand | WanDownCommand | WanStatusCommand | WanCutCommand | WanMendCommand


class _Options(Settings):
    """The command's quantities, read; under the names of its options."""

    rtt: Seconds
    rate: BytesPerSecond | None
    loss: Share
    jitter: Seconds
    queue: Bytes | None
    sites: pydantic.PositiveInt


def run(command: WanCommand) -> int:
    """Do it, print what there is then, and return the exit code: 3 where a link is broken."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if isinstance(command, WanUpCommand):
        return _up(command, console)
    if isinstance(command, WanDownCommand):
        removed = take_down(command.name)
        for what in removed:
            console.print(f"removed {what}")
        if not removed:
            console.print(f"no emulated network '{command.name}' was up")
        return 0
    wan = EmulatedWan.load(command.name)
    if isinstance(command, WanStatusCommand):
        return _status(wan, console)
    change, done = (cut, "cut") if isinstance(command, WanCutCommand) else (mend, "mended")
    for link in wan.links if command.link is None else [wan.link(command.link)]:
        change(wan, link)
        console.print(f"{done} the link {'-'.join(link.sites)}")
    return 0


def _up(command: WanUpCommand, console: Console) -> int:
    settings = _settings(command)
    with console.status("making and measuring the links"):
        wan = bring_up(settings, command.name, command.core)
    console.print(_heading(wan))
    console.print(_links(wan))
    console.print(_footnote(wan))
    return 0


def _settings(command: WanUpCommand) -> WanSettings:
    given = {name: getattr(command, name) for name in _Options.model_fields}
    options = validate(_Options, given, "geojax wan up")
    content = {
        "sites": options.sites,
        "round_trip_seconds": options.rtt,
        "bytes_per_second": options.rate,
        "loss": options.loss,
        "jitter_seconds": options.jitter,
        "queue_bytes": options.queue,
    }
    return validate(WanSettings, content, "geojax wan up")


def _status(wan: EmulatedWan, console: Console) -> int:
    from geojax.quantities import quantity

    console.print(_heading(wan))
    console.print(_links(wan))
    broken = ailments(wan)
    for what in broken:
        console.print(f"broken: {what}; geojax wan up makes it anew")
    if broken:
        return UNHEALTHY
    for link in wan.links:
        if is_cut(wan, link):
            name = "-".join(link.sites)
            console.print(f"cut: nothing crosses the link {name}; geojax wan mend joins it again")
    table = _table("site", "namespace", "address", "sent", "received")
    crossed = traffic(wan)
    for site in wan.sites:
        counted = crossed[site.name]
        numbers = (quantity(counted.sent_bytes, "B"), quantity(counted.received_bytes, "B"))
        table.add_row(site.name, site.namespace, site.address, *numbers)
    console.print(table)
    return 0


def _heading(wan: EmulatedWan) -> str:
    """The sites, and what is between them."""
    relays = [link.relay for link in wan.links if link.relay is not None]
    by = {
        "none": "unshaped",
        "netem": "shaped by the kernel's netem",
        "relay": f"shaped by a relay on core {relays[0].core}" if relays else "not finished",
    }
    names = ", ".join(site.name for site in wan.sites)
    return f"emulated network '{wan.name}': {names}; links {by[wan.shaper]}"


def _links(wan: EmulatedWan) -> Table:
    """What was asked of the links, and under it what was measured over each."""
    from geojax.quantities import quantity

    settings = wan.settings
    table = _table("link", "round trip", "there", "back", "loss", "jitter", "queue")
    rate = settings.bytes_per_second
    asked = quantity(rate * 8, "bit/s") if rate else "-"
    table.add_row(
        "asked",
        _milliseconds(settings.round_trip_seconds),
        asked,
        asked,
        f"{settings.loss:.3g}" if settings.loss else "-",
        _milliseconds(settings.jitter_seconds) if settings.jitter_seconds else "-",
        quantity(settings.queue_limit, "B") if rate else "-",
    )
    for link in wan.links:
        if link.measured is not None:
            rates = (quantity(each * 8, "bit/s") for each in link.measured.bytes_per_second)
            round_trip = _milliseconds(link.measured.round_trip_seconds)
            table.add_row("-".join(link.sites), round_trip, *rates)
    return table


def _footnote(wan: EmulatedWan) -> str:
    """What the measured rates are, beside the one that was asked."""
    text = f"measured with several TCP streams ({congestion_control(wan.sites[0])})"
    if wan.settings.bytes_per_second is None or wan.settings.loss:
        return text
    headers = 1 - LARGEST_SEGMENT / MTU
    return f"{text}, without most of the headers, which take {headers:.1%} of what was asked"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
