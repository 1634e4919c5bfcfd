"""Meet the processes of the other sites and connect with the counterparts of this one."""

import contextlib
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from geojax.errors import RunError, UserError
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

_STREAMS = 4


class Staging(NamedTuple):
    """Host memory that the engine of one process stages transfers in."""

    copies: int
    """Pieces that are staged at once."""
    piece_bytes: int
    """Largest piece."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.copies * self.piece_bytes


def staging(round_trip_seconds: float, bytes_per_second: float) -> Staging:
    """Return the staging for a process's share of a link: a few bandwidth-delay products.

    JAX's own default is 8 x 256 MiB for any link.
    """
    product = int(round_trip_seconds * bytes_per_second)
    piece = 1 << max(20, min(26, product.bit_length()))
    return Staging(8, piece)


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
        staging: host memory for transfers.
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
        server = private.start_server(engine, _STREAMS, staging.piece_bytes, staging.copies)
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
        everyone = rendezvous.join(
            members.site * members.processes + members.process,
            len(members.sites) * members.processes,
            members.coordinator,
            members.sites[members.site],
            timeout_seconds,
            address if members.site == members.process == 0 else None,
            own.signed(members.key),
        )
        names, endpoints = {}, {}
        for site, name in enumerate(members.sites):
            if site == members.site:
                continue
            presence = everyone.processes[site * members.processes + members.process]
            names[site] = f"site {name} (process {members.process}, host {presence.host})"
            peer = Endpoint.verified(presence.endpoint, members.key, names[site])
            require_same(members.settings, peer.settings, names[site])
            if peer.network != own.network:
                guard.forward(peer.guard, peer.engine, peer.ports)
            endpoints[site] = peer
        controls = _control_sockets(members, control, endpoints, silence_seconds)
        on_error.pop_all()
    peers = {
        site: Peer(
            names[site],
            controls[site],
            server.connect(f"{peer.engine}:{peer.server_port}"),
            _direction(own, peer),
            _direction(peer, own),
        )
        for site, peer in endpoints.items()
    }
    return EngineTransport(
        members.site,
        members.sites,
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
    members: Membership, listener: socket.socket, peers: Mapping[int, Endpoint], seconds: float
) -> dict[int, socket.socket]:
    """Connect with each peer once: the higher site dials the lower."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    with listener:
        for site, peer in peers.items():
            if site < members.site:
                try:
                    address = (peer.engine, peer.control_port)
                    found[site] = dial(address, members.key, peer.control_port, seconds)
                    found[site].sendall(bytes([members.site]))
                except (OSError, Refused) as error:
                    raise RunError(
                        f"transport: cannot reach site {members.sites[site]} at {peer.guard[0]} "
                        f"({error}); is the tunnel up?"
                    ) from None
        while len(found) < len(peers):
            try:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                connection, _ = listener.accept()
                admit(connection, members.key)
                found[connection.recv(1)[0]] = connection
            except Refused:
                continue
            except (OSError, IndexError) as error:
                missing = ", ".join(members.sites[site] for site in set(peers) - set(found))
                raise RunError(
                    f"transport: no connection from site {missing} ({error}); is the tunnel up?"
                ) from None
    return found
