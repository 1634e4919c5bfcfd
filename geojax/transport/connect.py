"""Meet the processes of the other sites and connect with the counterparts of this one."""

import contextlib
import math
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.runtime import rendezvous
from geojax.transport import private
from geojax.transport.endpoint import (
    Endpoint,
    address_towards,
    own_network,
    random_loopback,
    require_private,
)
from geojax.transport.engine import EngineTransport, Peer
from geojax.transport.guard import Refused, admit, dial
from geojax.transport.guard_process import GuardProcess
from geojax.transport.message_id import Direction
from geojax.transport.shared_settings import digests, require_same

_STREAM_BYTES_PER_SECOND = 0.5e9
_MOST_STREAMS = 8
_GROUP = struct.Struct("!H")


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

    sites: Sequence[str]
    """Names of the sites, in order."""
    site: int
    """Site of this process."""
    process: int
    """Index of this process in its site."""
    processes: int
    """Number of processes of each site."""
    coordinator: str
    """host:port of process 0 of site 0, as the other sites reach it."""
    key: bytes
    """Secret that the processes of this run share, of 16 to 64 bytes."""
    settings: Mapping[str, object]
    """JSON values that must be the same at all sites, by name."""
    address: str | None = None
    """Address of this host that the other sites reach: of its tunnel to them, or a loopback
    address on one machine. None: the address from which packets to the coordinator leave."""
    groups: int = 1
    """Groups of equally many consecutive processes in each site, which exchange messages with all
    others as sites do: its stages, where these have processes of their own."""

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
    if not 16 <= len(members.key) <= 64:
        raise UserError(f"transport: the key has {len(members.key)} bytes; it needs 16 to 64")
    host, _, port = members.coordinator.rpartition(":")
    address = members.address or address_towards(host.strip("[]"), int(port))
    require_private(address)
    with contextlib.ExitStack() as on_error:
        engine = random_loopback()
        control = on_error.enter_context(socket.create_server((engine, 0)))
        server = private.start_server(engine, staging.streams, staging.piece_bytes, staging.copies)
        ports = private.listening_ports(engine)
        guard = GuardProcess(members.key, address, engine, ports, silence_seconds)
        on_error.callback(guard.close)
        own = Endpoint(
            members.site,
            members.process,
            secrets.token_hex(8),
            own_network(),
            engine,
            int(server.address().rpartition(":")[2]),
            control.getsockname()[1],
            ports,
            *guard.address,
            digests(members.settings),
        )
        try:
            everyone = rendezvous.join(
                members.site * members.processes + members.process,
                len(members.sites) * members.processes,
                members.coordinator,
                members.sites[members.site],
                timeout_seconds,
                address if members.site == members.process == 0 else None,
                own.signed(members.key),
            )
        except MissingProcessesError as error:
            sites = dict.fromkeys(
                members.sites[each // members.processes] for each in error.missing
            )
            named = ", ".join(f"site {each}" for each in sites)
            raise MissingProcessesError(f"{error} ({named})", error.missing) from None
        names, endpoints = {}, {}
        for group in range(len(members.sites) * members.groups):
            if group == members.group:
                continue
            site, process = members.counterpart(group)
            presence = everyone.processes[site * members.processes + process]
            names[group] = f"site {members.sites[site]} (process {process}, host {presence.host})"
            peer = Endpoint.verified(presence.endpoint, members.key, names[group])
            here = f"site {members.sites[members.site]}"
            require_same(members.settings, here, peer.settings, names[group])
            if peer.network != own.network:
                guard.forward(peer.guard, peer.engine, peer.ports)
            endpoints[group] = peer
        controls = _control_sockets(members, control, endpoints, names, silence_seconds)
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
        [name for name in members.sites for _ in range(members.groups)],
        members.key,
        server,
        guard,
        peers,
        limit_bytes,
        silence_seconds,
    )


def _direction(sender: Endpoint, receiver: Endpoint) -> Direction:
    return Direction(
        (sender.site, sender.process),
        (receiver.site, receiver.process),
        sender.nonce,
        receiver.nonce,
    )


def _control_sockets(
    members: Membership,
    listener: socket.socket,
    peers: Mapping[int, Endpoint],
    names: Mapping[int, str],
    seconds: float,
) -> dict[int, socket.socket]:
    """Connect with each peer once: the higher group dials the lower, and says its number."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    with listener:
        for group, peer in peers.items():
            if group < members.group:
                try:
                    address = (peer.engine, peer.control_port)
                    found[group] = dial(address, members.key, peer.control_port, seconds)
                    found[group].sendall(_GROUP.pack(members.group))
                except (OSError, Refused) as error:
                    raise RunError(
                        f"transport: cannot reach {names[group]} at {peer.guard[0]} ({error}); is "
                        "the tunnel up?"
                    ) from None
        while len(found) < len(peers):
            try:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                connection, _ = listener.accept()
                admit(connection, members.key)
                (group,) = _GROUP.unpack(connection.recv(_GROUP.size, socket.MSG_WAITALL))
                found[group] = connection
            except Refused:
                continue
            except (OSError, struct.error) as error:
                missing = ", ".join(names[group] for group in sorted(set(peers) - set(found)))
                raise RunError(
                    f"transport: no connection from {missing} ({error}); is the tunnel up?"
                ) from None
    return found
