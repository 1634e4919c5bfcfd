"""Advice on TCP settings that keep this host from filling the links between sites.

A stream that keeps W bytes in flight carries at most W / round trip. The streams of a link together
must keep its bandwidth-delay product in flight: 262 MB at 100 Gbit/s and 21 ms. The kernel grows
buffers by itself up to the last figures of tcp_rmem and tcp_wmem, of which about half is
bookkeeping; the defaults allow a few MB.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from geojax.errors import UserError
from geojax.quantities import quantity
from geojax.runtime.advice.nccl_advice import nccl_advice
from geojax.topology import Link, Process, Topology

_MEBIBYTE = 2**20
_LARGEST_BUFFER = 2**31 - 1
# TCP's window ends at 1 GiB (RFC 7323, section 2.3), and one lost packet halves it or worse.
_LARGE_WINDOW = 2**26
# Below this a pause or a lost packet costs little, whatever the settings are.
_LONG_ROUND_TRIP_SECONDS = 2e-3
_NCCL_SOCKETS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
_RECOVERS_SLOWLY = ("cubic", "reno")


@dataclasses.dataclass(frozen=True)
class TcpSettings:
    """Linux's settings for TCP streams, from /proc/sys/net."""

    tcp_rmem: tuple[int, int, int]
    """Bytes of a receive buffer: smallest, initial, largest."""
    tcp_wmem: tuple[int, int, int]
    """Bytes of a send buffer: smallest, initial, largest."""
    rmem_max: int
    """Largest receive buffer in bytes that a program may request."""
    wmem_max: int
    """Largest send buffer in bytes that a program may request."""
    congestion_control: str
    """Congestion control of new streams: cubic, bbr ..."""
    slow_start_after_idle: bool
    """True if a stream starts from a small window again after a pause."""

    @classmethod
    def read(cls, folder: Path = Path("/proc/sys/net")) -> "TcpSettings | None":
        """Read the settings of this host; None if it has none (no Linux)."""

        def words(name: str) -> list[str]:
            return (folder / name).read_text(encoding="ascii").split()

        def three(name: str) -> tuple[int, int, int]:
            least, first, most = map(int, words(name))
            return least, first, most

        try:
            receive, send = three("ipv4/tcp_rmem"), three("ipv4/tcp_wmem")
            return cls(
                tcp_rmem=receive,
                tcp_wmem=send,
                # Network namespaces other than the first do not show these two.
                rmem_max=int(words("core/rmem_max")[0]) if _has(folder, "rmem") else receive[2],
                wmem_max=int(words("core/wmem_max")[0]) if _has(folder, "wmem") else send[2],
                congestion_control=words("ipv4/tcp_congestion_control")[0],
                slow_start_after_idle=words("ipv4/tcp_slow_start_after_idle")[0] != "0",
            )
        except (OSError, ValueError):
            return None


def link_advice(
    name: str, link: Link, streams: int, tcp: TcpSettings, environment: Mapping[str, str]
) -> list[str]:
    """List the settings that keep this host from filling `link`, a line each.

    Args:
        name: name of the link in the messages.
        link: its round trip and bandwidth.
        streams: number of TCP streams that share it.
        tcp: the host's TCP settings.
        environment: the process's variables, including NCCL's.
    """
    rate, trip = link.bytes_per_second, link.round_trip_seconds
    product = round(rate * trip)
    needed = product / streams
    wanted = min(math.ceil(2 * needed / _MEBIBYTE) * _MEBIBYTE, _LARGEST_BUFFER)
    most = min(tcp.tcp_rmem[2], tcp.tcp_wmem[2])
    lines = []
    if most < wanted:
        lines.append(
            f"TCP buffers keep {quantity(most / 2, 'B')} of a stream in flight, so at most "
            f"{_bits(streams * most / 2 / trip)}: sysctl -w net.ipv4.tcp_rmem='"
            f"{_three(tcp.tcp_rmem, wanted)}' net.ipv4.tcp_wmem='"
            f"{_three(tcp.tcp_wmem, wanted)}'"
        )
    if needed > _LARGE_WINDOW and _NCCL_SOCKETS[1] not in environment:
        lines.append(
            "on GPUs, where NCCL crosses the link over TCP, several sockets a connection share "
            "this: NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"
        )
    if min(tcp.rmem_max, tcp.wmem_max) < wanted:
        lines.append(
            "programs that size their buffers themselves get less: sysctl -w "
            f"net.core.rmem_max={wanted} net.core.wmem_max={wanted}"
        )
    if trip >= _LONG_ROUND_TRIP_SECONDS:
        if tcp.slow_start_after_idle:
            lines.append(
                "after each pause between steps a stream starts slowly again: sysctl -w "
                "net.ipv4.tcp_slow_start_after_idle=0"
            )
        if tcp.congestion_control in _RECOVERS_SLOWLY:
            lines.append(
                f"{tcp.congestion_control} takes many round trips to recover from one lost "
                "packet: sysctl -w net.ipv4.tcp_congestion_control=bbr"
            )
    if not lines:
        return []
    share = f"; {streams} streams share them" if streams > 1 else ""
    return [
        f"{name}: {_bits(rate)} x {trip * 1e3:.4g} ms keep {quantity(product, 'B')} in flight"
        f"{share}",
        *(f"  {line}" for line in lines),
    ]


def advice_of_process(
    topology: Topology, processes: Sequence[Process], own: int, environment: Mapping[str, str]
) -> list[str]:
    """Give advice on the links of process `own`'s site, in one process of each site only.

    There is none if all sites are on one host, where packets do not cross the link.
    """
    sites: dict[str, list[Process]] = {}
    for process in processes:
        sites.setdefault(process.site or "", []).append(process)
    members = next(members for members in sites.values() if any(p.index == own for p in members))
    tcp = TcpSettings.read()
    if members[0].index != own or len({p.host for p in processes}) == 1 or tcp is None:
        return []
    lines = []
    for name, others in sites.items():
        if name == (members[0].site or ""):
            continue
        try:
            link = topology.link(members[0].site or "", name)
        except UserError:  # the link is not described
            continue
        pairs = min(len(members), len(others)) * nccl_sockets(environment)
        title = f"link {members[0].site}-{name} (host {members[0].host})"
        lines += link_advice(title, link, pairs, tcp, environment)
        if members[0].device_kind.startswith("NVIDIA"):
            network = topology.site(members[0].site or "").between_hosts
            devices = sum(process.devices for process in members)
            card = None if network is None else network.bytes_per_second
            lines += [f"{title}: {line}" for line in nccl_advice(link, devices, card, environment)]
    return lines


def _has(folder: Path, kind: str) -> bool:
    return (folder / "core" / f"{kind}_max").exists()


def nccl_sockets(environment: Mapping[str, str]) -> int:
    """Return the number of sockets that NCCL opens for a connection."""
    given = (environment.get(name, "") for name in _NCCL_SOCKETS)
    return math.prod(int(number) if number.isdecimal() and int(number) else 1 for number in given)


def _three(current: tuple[int, int, int], most: int) -> str:
    return f"{current[0]} {current[1]} {max(most, current[2])}"


def _bits(bytes_per_second: float) -> str:
    return quantity(8 * bytes_per_second, "bit/s")
