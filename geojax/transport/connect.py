"""Meet the processes of the other sites and connect with the counterparts of this one."""

import contextlib
import math
import secrets
import time
from collections.abc import Mapping
from typing import NamedTuple

from geojax.errors import MissingProcessesError, RunError
from geojax.job.island_env import IslandSettings
from geojax.network_names import HostPort
from geojax.runtime import rendezvous
from geojax.transport import private
from geojax.transport.control import ControlConnection
from geojax.transport.control_handshake import Party, PeerRoute
from geojax.transport.control_listener import ControlListener
from geojax.transport.endpoint import (
    Endpoint,
    address_towards,
    own_network,
    random_loopback,
    require_private,
)
from geojax.transport.engine import EngineTransport, Peer
from geojax.transport.guard_process import GuardProcess
from geojax.transport.message_id import Direction
from geojax.transport.shared_settings import digests, require_same

_STREAM_BYTES_PER_SECOND = 0.5e9
_MOST_STREAMS = 8
_LOOK_SECONDS = 0.05


class Staging(NamedTuple):
    """Host memory and connections with which the engine of one process carries transfers."""

    copies: int
    """Pieces that are staged at once."""
    piece_bytes: int
    """Largest piece."""
    streams: int
    """TCP connections that carry data to one peer."""

    @property
    def total_bytes(self) -> int:
        """Host memory that holds pieces."""
        return self.copies * self.piece_bytes


def staging(round_trip_seconds: float, bytes_per_second: float) -> Staging:
    """Return the staging for a process's share of a link: a few bandwidth-delay products.

    JAX's own default is 8 x 256 MiB for any link.

    Pieces go to the connections in turn, however fast each of them is, so that a message is there
    when the slowest has carried its part: there are as few as the rate allows.
    """
    product = int(round_trip_seconds * bytes_per_second)
    piece = 1 << max(20, min(26, product.bit_length()))
    streams = math.ceil(bytes_per_second / _STREAM_BYTES_PER_SECOND)
    return Staging(8, piece, max(1, min(_MOST_STREAMS, streams)))


class Membership(NamedTuple):
    """Place of this process among those of all sites."""

    island: IslandSettings
    """The sites, this process's among them, and where they meet."""
    process: int
    """Index of this process in its site."""
    processes: int
    """Number of processes of each site."""
    settings: Mapping[str, object]
    """JSON values that must be the same at all sites, by name."""
    groups: int = 1
    """Groups of equally many consecutive processes in each site, which exchange messages with all
    others as sites do: its stages, where these have processes of their own."""
    port: int = 0
    """Port of this process's guard, the only one that other sites reach; 0: any."""

    @property
    def key(self) -> bytes:
        """Secret that the processes of this run share."""
        return self.island.key.encode()

    @property
    def site(self) -> int:
        """Index of this process's site."""
        return self.island.sites.index(self.island.site)

    @property
    def group(self) -> int:
        """Group of this process, counted through all sites."""
        return self.site * self.groups + self.process // self._processes_per_group

    def counterpart(self, group: int) -> tuple[int, int]:
        """Return site and index of the process of a group with which this one exchanges."""
        site, in_site = divmod(group, self.groups)
        size = self._processes_per_group
        return site, in_site * size + self.process % size

    @property
    def _processes_per_group(self) -> int:
        return self.processes // self.groups


def connect(
    members: Membership,
    staging: Staging,
    limit_bytes: int,
    silence_seconds: float = 40.0,
    timeout_seconds: float = 300.0,
) -> EngineTransport:
    """Meet the processes of the other sites; return the transport to the counterparts of this one.

    Every process of every site calls this, in the same run or in jobs of different schedulers.

    Args:
        members: place of this process.
        staging: host memory and connections for transfers.
        limit_bytes: most bytes in flight to one peer.
        silence_seconds: a peer that gives no sign for so long counts as lost.
        timeout_seconds: time to wait for all processes.

    Raises:
        UserError: an address is public or not this host's, or keys, settings, versions or numbers
            of processes are not the same everywhere.
        MissingProcessesError: some processes did not come in time.
    """
    sites, address = members.island.sites, _own_address(members.island)
    with contextlib.ExitStack() as on_error:
        engine = random_loopback()
        listener = ControlListener(engine, members.key)
        on_error.callback(listener.close)
        server = private.start_server(engine, staging.streams, staging.piece_bytes, staging.copies)
        ports = private.listening_ports(engine)
        guard = GuardProcess(members.key, (address, members.port), engine, ports, silence_seconds)
        on_error.callback(guard.close)
        own = Endpoint(
            members.site,
            members.process,
            secrets.token_hex(8),
            own_network(),
            engine,
            int(server.address().rpartition(":")[2]),
            listener.port,
            ports,
            *guard.address,
            digests(members.settings),
        )
        everyone = meet(
            members.island, members.process, members.processes, timeout_seconds, own.text()
        )
        names, endpoints = {}, {}
        for group in range(len(sites) * members.groups):
            if group == members.group:
                continue
            site, process = members.counterpart(group)
            presence = everyone.processes[site * members.processes + process]
            names[group] = f"site {sites[site]} (process {process}, host {presence.host})"
            peer = Endpoint.parse(presence.endpoint, names[group])
            here = f"site {members.island.site}"
            require_same(members.settings, here, peer.settings, names[group])
            endpoints[group] = peer
        controls = _open_controls(members, own, endpoints, guard, listener, on_error)
        _wait_for_all(members, own, endpoints, names, controls, silence_seconds)
        on_error.pop_all()
    peers = {
        group: Peer(
            names[group],
            controls[group],
            server.connect(f"{peer.engine}:{peer.server_port}"),
            _direction(own, peer),
            _direction(peer, own),
        )
        for group, peer in endpoints.items()
    }
    return EngineTransport(
        members.group,
        [name for name in sites for _ in range(members.groups)],
        members.key,
        server,
        guard,
        listener,
        peers,
        limit_bytes,
        silence_seconds,
    )


def meet(
    island: IslandSettings,
    process: int,
    processes: int,
    timeout_seconds: float,
    endpoint: str | None = None,
    *,
    key: bytes | None = None,
    note: str | None = None,
) -> rendezvous.Everyone:
    """Meet processes of all sites at the coordinator; return the facts of each, site by site.

    Args:
        island: the sites, this process's among them, and where they meet.
        process: index of this process among those of its site that take part.
        processes: number of those of each site.
        timeout_seconds: time to wait for the others.
        endpoint: text about this process for all others.
        key: secret of those that take part; None: the run's.
        note: text of the first process of the first site for all.

    Raises:
        UserError: this host's address is public, or processes do not fit together.
        MissingProcessesError: some processes did not come in time; their sites are named.
    """
    site = island.sites.index(island.site)
    try:
        return rendezvous.join(
            site * processes + process,
            len(island.sites) * processes,
            island.coordinator,
            island.site,
            timeout_seconds,
            _own_address(island) if site == process == 0 else None,
            endpoint,
            island.key.encode() if key is None else key,
            note,
        )
    except MissingProcessesError as error:
        missing = dict.fromkeys(island.sites[each // processes] for each in error.missing)
        named = ", ".join(f"site {each}" for each in missing)
        raise MissingProcessesError(f"{error} ({named})", error.missing) from None


def _own_address(island: IslandSettings) -> str:
    """Return the address of this host that the other sites reach.

    Raises:
        UserError: there is none, or strangers reach it.
    """
    address = island.address or address_towards(*HostPort.parse(island.coordinator))
    require_private(address)
    return address


def _direction(sender: Endpoint, receiver: Endpoint) -> Direction:
    return Direction(
        (sender.site, sender.process),
        (receiver.site, receiver.process),
        sender.nonce,
        receiver.nonce,
    )


def _open_controls(
    members: Membership,
    own: Endpoint,
    peers: Mapping[int, Endpoint],
    guard: GuardProcess,
    listener: ControlListener,
    on_error: contextlib.ExitStack,
) -> dict[int, ControlConnection]:
    """Begin to open a control connection to each peer, and to take those of the peers.

    Peers in the same network are reached directly, all others through their guards.
    """
    party = Party(members.group, own.nonce)
    parties = {group: Party(group, peer.nonce) for group, peer in peers.items()}
    controls: dict[int, ControlConnection] = {}
    for group, peer in peers.items():
        near = peer.network == own.network
        address = (peer.engine, peer.control_port) if near else peer.guard
        guarded_port = None if near else peer.control_port
        route = PeerRoute(members.key, party, parties[group], address, guarded_port)
        controls[group] = ControlConnection(route)
        on_error.callback(controls[group].close, 0.0)
        if not near:
            data_ports = [port for port in peer.ports if port != peer.control_port]
            guard.forward(peer.guard, peer.engine, data_ports, controls[group].hear)
    listener.serve(party, parties, controls)
    return controls


def _wait_for_all(
    members: Membership,
    own: Endpoint,
    peers: Mapping[int, Endpoint],
    names: Mapping[int, str],
    controls: Mapping[int, ControlConnection],
    seconds: float,
) -> None:
    """Wait until this process has reached each peer and each has reached this one.

    Raises:
        RunError: one is refused, lost, or late; the message names the port in question.
    """
    deadline = time.monotonic() + seconds
    site = members.island.site
    for group, control in controls.items():
        while not (control.reached.is_set() and control.was_reached.is_set()):
            if control.lost is None and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            elif not control.reached.is_set():
                host, port = peers[group].guard
                peer_site = members.island.sites[peers[group].site]
                tried = "refused" if control.lost else f"{control.problem}, for {seconds:g} s"
                raise RunError(
                    f"transport: {site} cannot reach {peer_site}:{port}, "
                    f"{names[group]} at {host} ({tried}); is the tunnel up, and do the firewalls "
                    "let TCP to this port through?"
                )
            elif control.lost is not None:
                raise RunError(f"transport: lost the connection to {names[group]}: {control.lost}")
            else:
                host, port = own.guard
                raise RunError(
                    f"transport: {names[group]} has not reached {site}:{port} at {host} within "
                    f"{seconds:g} s; do the firewalls let TCP to this port through?"
                )
