"""Meet the processes of the other sites and connect with the counterparts of this one."""

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from geojax.errors import MissingProcessesError, RunError
from geojax.job.island_env import IslandSettings
from geojax.network_names import HostPort
from geojax.runtime import rendezvous
from geojax.transport.carrier import CarrierTransport, Limits, Peer
from geojax.transport.endpoint import Endpoint, address_towards, require_private
from geojax.transport.handshake import Party
from geojax.transport.message_id import Direction
from geojax.transport.peer_listener import PeerListener
from geojax.transport.shared_settings import digests, require_same
from geojax.transport.streams import Streams

_LOOK_SECONDS = 0.05


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
    """Port of this process, the only one that other sites reach; 0: any."""

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
    streams: Streams,
    limit_bytes: int,
    silence_seconds: float = 40.0,
    timeout_seconds: float = 300.0,
    *,
    goes_on: bool = False,
) -> CarrierTransport:
    """Meet the processes of the other sites; return the transport to the counterparts of this one.

    Every process of every site calls this, in the same run or in jobs of different schedulers.

    Args:
        members: place of this process.
        streams: connections for messages from each peer.
        limit_bytes: most bytes in flight to one peer.
        silence_seconds: a peer that gives no sign for so long counts as lost.
        timeout_seconds: time to wait for all processes.
        goes_on: the run goes on without peers that are lost. The caller decides of silent ones.

    Raises:
        UserError: an address is public or not this host's, or keys, settings, versions or numbers
            of processes are not the same everywhere.
        MissingProcessesError: some processes did not come in time.
    """
    joined = begin(members, Limits(streams, limit_bytes, silence_seconds, goes_on))
    return meet_all(joined, silence_seconds, timeout_seconds).transport


class Joined(NamedTuple):
    """This process among those of all sites, and the transport to its counterparts."""

    members: Membership
    transport: CarrierTransport
    endpoint: Endpoint
    """The start of this process."""
    processes: Sequence[rendezvous.Presence] = ()
    """All processes of this site, which have met others."""

    def peer(self, group: int, host: str, endpoint: str | None) -> Peer:
        """Return the counterpart in a group, in the start that has presented itself.

        Args:
            group: the group.
            host: name of the counterpart's host.
            endpoint: text of its endpoint.

        Raises:
            UserError: it does not fit.
        """
        return peer_of(self.members, self.endpoint, group, host, endpoint)


def meet_all(joined: Joined, silence_seconds: float, timeout_seconds: float) -> Joined:
    """Meet the processes of the other sites at a start, and connect with the counterparts.

    A failure closes the transport.

    Args:
        joined: this process, whose port is open.
        silence_seconds: time for the connections.
        timeout_seconds: time to wait for all processes.

    Returns:
        The same, with the processes of this site.

    Raises:
        UserError: keys, settings, versions or numbers of processes are not the same everywhere.
        MissingProcessesError: some processes did not come in time.
    """
    members, transport, own = joined.members, joined.transport, joined.endpoint
    with contextlib.ExitStack() as on_error:
        on_error.callback(transport.close, failed=True)
        everyone = meet(
            members.island, members.process, members.processes, timeout_seconds, own.text()
        )
        peers = []
        for group in transport.counters:
            site, process = members.counterpart(group)
            presence = everyone.processes[site * members.processes + process]
            peers.append(joined.peer(group, presence.host, presence.endpoint))
        for peer in peers:
            transport.take_up(peer)
        wait_for_all(members, transport, peers, silence_seconds)
        on_error.pop_all()
    first = members.site * members.processes
    return joined._replace(processes=everyone.processes[first : first + members.processes])


def begin(members: Membership, limits: Limits) -> Joined:
    """Open the port of this process, which has no peers yet.

    Raises:
        UserError: this process's address is public, or not this host's.
    """
    listener = PeerListener((own_address(members.island), members.port), members.key)
    own = Endpoint(
        members.site,
        members.process,
        secrets.token_hex(8),
        *listener.address,
        digests(members.settings),
    )
    names = [name for name in members.island.sites for _ in range(members.groups)]
    party = Party(members.group, own.nonce)
    return Joined(members, CarrierTransport(party, names, members.key, listener, limits), own)


def peer_of(
    members: Membership, own: Endpoint, group: int, host: str, endpoint: str | None
) -> Peer:
    """Return the counterpart in a group, in the start that an endpoint is of.

    Args:
        members: place of this process.
        own: its endpoint.
        group: the group.
        host: name of the peer's host.
        endpoint: text of its endpoint.

    Raises:
        UserError: the peer does not fit.
    """
    sites = members.island.sites
    site, process = members.counterpart(group)
    name = f"site {sites[site]} (process {process}, host {host})"
    peer = Endpoint.parse(endpoint, name)
    require_same(members.settings, f"site {members.island.site}", peer.settings, name)
    there = Direction((own.site, own.process), (peer.site, peer.process), own.nonce, peer.nonce)
    return Peer(name, Party(group, peer.nonce), peer.address, there)


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
            own_address(island) if site == process == 0 else None,
            endpoint,
            island.key.encode() if key is None else key,
            note,
        )
    except MissingProcessesError as error:
        missing = dict.fromkeys(island.sites[each // processes] for each in error.missing)
        named = ", ".join(f"site {each}" for each in missing)
        raise MissingProcessesError(f"{error} ({named})", error.missing) from None


def own_address(island: IslandSettings) -> str:
    """Return the address of this host that the other sites reach.

    Raises:
        UserError: there is none, or strangers reach it.
    """
    address = island.address or address_towards(*HostPort.parse(island.coordinator))
    require_private(address)
    return address


def wait_for_all(
    members: Membership, transport: CarrierTransport, peers: Sequence[Peer], seconds: float
) -> None:
    """Wait until this process has reached each peer and each has reached this one.

    Raises:
        RunError: one is refused, lost, or late; the message names the port in question.
    """
    deadline = time.monotonic() + seconds
    site = members.island.site
    for peer in peers:
        control = transport.links[peer.party.group].control
        while not (control.reached.is_set() and control.was_reached.is_set()):
            if control.lost is None and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            elif not control.reached.is_set():
                host, port = peer.address
                peer_site = transport.site_names[peer.party.group]
                tried = "refused" if control.lost else f"{control.problem}, for {seconds:g} s"
                raise RunError(
                    f"transport: {site} cannot reach {peer_site}:{port}, "
                    f"{peer.name} at {host} ({tried}); is the tunnel up, and do the firewalls "
                    "let TCP to this port through?"
                )
            elif control.lost is not None:
                raise RunError(f"transport: lost the connection to {peer.name}: {control.lost}")
            else:
                host, port = transport.address
                raise RunError(
                    f"transport: {peer.name} has not reached {site}:{port} at {host} within "
                    f"{seconds:g} s; do the firewalls let TCP to this port through?"
                )
