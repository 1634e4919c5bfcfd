"""`geojax wan`: emulated long links between sites on this machine."""

import dataclasses
from typing import Annotated

import pydantic
from rich.console import Console
from rich.table import Table

from geojax.exit_codes import UNHEALTHY
from geojax.quantities import Bytes, BytesPerSecond, Seconds, Share
from geojax.settings import Settings, validate
from geojax.wan import (
    EmulatedWan,
    WanSettings,
    bring_up,
    congestion_control,
    cut,
    is_cut,
    problems,
    restore,
    take_down,
    traffic,
)
from geojax.wan.settings import LARGEST_SEGMENT, MTU, SITE_NAMES
from geojax.wan.state import Relay


class WanUpCommand(Settings):
    """Join sites on this machine by emulated long links, for commands that run in them.

    Each site is a network namespace, and a link joins each two sites. Without options the links are
    as fast as the kernel. The command measures and prints round trip and throughput. It needs root.
    `ip netns exec geojax.wan.east COMMAND` runs a command in the site east.
    """

    sites: int = pydantic.Field(default=2, ge=1, le=len(SITE_NAMES))
    """Number of sites: east, west, north, south."""

    rtt: Seconds = 0.0
    """Round trip of a link, such as 21ms."""

    rate: BytesPerSecond | None = None
    """Bandwidth of a link in each direction, such as 1gbit or 200mbit. It counts IP packets with
    their headers. Default: no limit."""

    loss: Share = 0.0
    """Share of lost packets, such as 0.1%, up to 50%."""

    jitter: Seconds = 0.0
    """Largest difference of a packet's delay from half the round trip; packets keep their order."""

    queue: Bytes | None = None
    """Most bytes that wait for a link, such as 4MiB. Default: bandwidth-delay product + 1 MiB."""

    core: Annotated[int, pydantic.Field(ge=0, lt=2**16)] | None = None
    """CPU core of the relay, which runs if the kernel has no netem. Default: the last two cores,
    one for each direction."""

    name: str = "wan"
    """Name of this emulated network among those on this machine."""


@dataclasses.dataclass(frozen=True)
class WanDownCommand:
    """Remove an emulated network, or what a crash has left of it. Needs root."""

    name: str = "wan"
    """Name that was given to `geojax wan up`."""


@dataclasses.dataclass(frozen=True)
class WanStatusCommand:
    """Show an emulated network: its settings, its measurements, and the bytes that crossed it."""

    name: str = "wan"
    """Name that was given to `geojax wan up`."""


@dataclasses.dataclass(frozen=True)
class WanCutCommand:
    """Cut a link, so that nothing crosses it, as if the fiber were broken. Needs root."""

    link: str | None = None
    """Link to change, such as east-west; default: all of them."""

    name: str = "wan"
    """Name of the network that was given to `geojax wan up`."""


@dataclasses.dataclass(frozen=True)
class WanRestoreCommand:
    """Restore links that were cut, so that they carry packets again. Needs root."""

    link: str | None = None
    """Link to change, such as east-west; default: all of them."""

    name: str = "wan"
    """Name of the network that was given to `geojax wan up`."""


WanCommand = WanUpCommand | WanDownCommand | WanStatusCommand | WanCutCommand | WanRestoreCommand


def run(command: WanCommand) -> int:
    """Run the command, print the result, and return the exit code: 3 if a link is broken."""
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
    change, done = (cut, "cut") if isinstance(command, WanCutCommand) else (restore, "restored")
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
    content = {
        "sites": command.sites,
        "round_trip_seconds": command.rtt,
        "bytes_per_second": command.rate,
        "loss": command.loss,
        "jitter_seconds": command.jitter,
        "queue_bytes": command.queue,
    }
    return validate(WanSettings, content, "geojax wan up")


def _status(wan: EmulatedWan, console: Console) -> int:
    from geojax.quantities import quantity

    console.print(_heading(wan))
    console.print(_links(wan))
    broken = problems(wan)
    for what in broken:
        console.print(f"broken: {what}; geojax wan up makes it anew")
    if broken:
        return UNHEALTHY
    for link in wan.links:
        if is_cut(wan, link):
            name = "-".join(link.sites)
            console.print(f"cut: nothing crosses the link {name}; geojax wan restore undoes that")
    table = _table("site", "namespace", "address", "sent", "received")
    crossed = traffic(wan)
    for site in wan.sites:
        counted = crossed[site.name]
        numbers = (quantity(counted.sent_bytes, "B"), quantity(counted.received_bytes, "B"))
        table.add_row(site.name, site.namespace, site.address, *numbers)
    console.print(table)
    return 0


def _heading(wan: EmulatedWan) -> str:
    """Return a line with the sites and the kind of links between them."""
    relays = [link.relay for link in wan.links if link.relay is not None]
    by = {
        "none": "unshaped",
        "netem": "shaped by the kernel's netem",
        "relay": f"shaped by a relay on {_cores(relays[0])}" if relays else "not finished",
    }
    names = ", ".join(site.name for site in wan.sites)
    return f"emulated network '{wan.name}': {names}; links {by[wan.shaper]}"


def _cores(relay: Relay) -> str:
    """Return the cores on which both directions are carried, in words."""
    there, back = relay.cores
    return f"core {there}" if there == back else f"cores {there} and {back}"


def _links(wan: EmulatedWan) -> Table:
    """Make a table of the requested link, and under it the measurement of each link."""
    from geojax.quantities import quantity

    settings = wan.settings
    table = _table("link", "round trip", "there", "back", "loss", "jitter", "queue")
    rate = settings.bytes_per_second
    requested = quantity(rate * 8, "bit/s") if rate else "-"
    table.add_row(
        "requested",
        _milliseconds(settings.round_trip_seconds),
        requested,
        requested,
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
    """Explain how the measured rates compare with the requested one."""
    text = f"measured with several TCP streams ({congestion_control(wan.sites[0])})"
    if wan.settings.bytes_per_second is None or wan.settings.loss:
        return text
    headers = 1 - LARGEST_SEGMENT / MTU
    return f"{text}, without most of the headers, which take {headers:.1%} of the requested rate"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
