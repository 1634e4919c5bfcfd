"""Meet the other sites and connect with the counterparts of this process there.

The first process of each site meets those of the others, and presents all processes of its own:
sites with thousands of processes need as many messages as they are sites. The processes of a site
do all of it together.
"""

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.job.island_env import IslandSettings
from geojax.network_names import HostPort
from geojax.runtime import agreement, rendezvous
from geojax.runtime.agreement import Talk
from geojax.transport.carrier import CarrierTransport, Limits, Peer
from geojax.transport.control import ControlConnection
from geojax.transport.endpoint import (
    Endpoint,
    ProcessOfSite,
    address_towards,
    as_text,
    processes_of,
    require_private,
)
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
    """Number of processes of its site."""
    settings: Mapping[str, object]
    """JSON values that must be the same at all sites, by name."""
    groups: int = 1
    """Groups of equally many consecutive processes in each site, which exchange messages with all
    others as sites do: its stages, where these have processes of their own."""
    port: int = 0
    """Port of this process, the only one that other sites reach; 0: any."""
    devices: Sequence[jax.Device] = ()
    """Devices of this process, in the order of the mesh, which it divides among several processes
    of another site; (): each of these holds what this one holds."""
    talk: Talk = agreement
    """The way in which the processes of the site find out something together."""

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

    def counterparts(self, group: int, processes: int) -> range:
        """Return the processes of a group with which this one exchanges, by their index.

        Args:
            group: the group.
            processes: number of processes of its site.

        Raises:
            UserError: the numbers of processes do not fit together.
        """
        own, there = self._processes_per_group, processes // self.groups
        if processes % self.groups or not there or (own % there and there % own):
            raise UserError(
                f"site {self.island.site} has {self.processes} processes and site "
                f"{self.island.sites[group // self.groups]} {processes}: start equally many, or in "
                "one of them a multiple"
            )
        first = group % self.groups * there + self.process % own * there // own
        return range(first, first + max(1, there // own))

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
        UserError: an address is public or not this host's, keys, settings or versions are not the
            same everywhere, or numbers of processes do not fit together.
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
    processes: Sequence[ProcessOfSite] = ()
    """All processes of this site, in the first one, when they have met."""

    def gathered(self, seconds: float) -> "Joined":
        """Return the same with the processes of this site, all of which call it together.

        Raises:
            MissingProcessesError: some did not come in time.
        """
        own = f"{socket.gethostname()} {self.endpoint.text()}"
        values = self.members.talk.values_at_first("endpoints", own, seconds)
        found = [ProcessOfSite(*each.partition(" ")[::2]) for each in values]
        return self._replace(processes=found)

    def peers(self, group: int, processes: Sequence[ProcessOfSite]) -> list[Peer]:
        """Return the counterparts of this process in a group.

        Args:
            group: the group.
            processes: all of its site, in the start that has presented itself.

        Raises:
            UserError: some process does not fit.
        """
        members = self.members
        island, site = members.island, group // members.groups
        found = []
        for process, (host, text) in enumerate(processes):
            name = f"site {island.sites[site]} (process {process}, host {host})"
            peer = Endpoint.parse(text, name)
            require_same(members.settings, f"site {island.site}", peer.settings, name)
            found.append((name, peer))
        return [self._peer(group, *found[at]) for at in members.counterparts(group, len(found))]

    def _peer(self, group: int, name: str, there: Endpoint) -> Peer:
        own = self.endpoint
        direction = Direction(
            (own.site, own.process), (there.site, there.process), own.nonce, there.nonce
        )
        party = Party(group, there.nonce, there.process)
        return Peer(name, party, there.address, direction)


def meet_all(joined: Joined, silence_seconds: float, timeout_seconds: float) -> Joined:
    """Meet the other sites at a start, and connect with the counterparts.

    A failure closes the transport.

    Args:
        joined: this process, whose port is open.
        silence_seconds: time for the connections.
        timeout_seconds: time to wait for all processes.

    Returns:
        The same, with the processes of this site.

    Raises:
        UserError: keys, settings or versions are not the same everywhere, or numbers of processes
            do not fit together.
        MissingProcessesError: some processes did not come in time.
    """
    members, transport = joined.members, joined.transport
    sites = members.island.sites
    with contextlib.ExitStack() as on_error:
        on_error.callback(transport.close, failed=True)
        joined = joined.gathered(timeout_seconds)

        def ask() -> str:
            everyone = meet(members.island, timeout_seconds, as_text(joined.processes))
            return json.dumps([presence.endpoint for presence in everyone.processes])

        told = members.talk.told_by_first("sites", ask, timeout_seconds + silence_seconds)
        of_sites = [
            processes_of(text, f"site {name}")
            for name, text in zip(sites, json.loads(told), strict=True)
        ]
        connect_with(
            joined,
            {group: of_sites[group // members.groups] for group in transport.counters},
            silence_seconds,
        )
        on_error.pop_all()
    return joined


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
    party = Party(members.group, own.nonce, own.process)
    transport = CarrierTransport(party, names, members.key, listener, limits, members.devices)
    return Joined(members, transport, own)


def meet(
    island: IslandSettings,
    timeout_seconds: float,
    endpoint: str | None = None,
    *,
    key: bytes | None = None,
    note: str | None = None,
) -> rendezvous.Everyone:
    """Meet the first processes of all sites at the coordinator; return the facts of each.

    Args:
        island: the sites, this process's among them, and where they meet.
        timeout_seconds: time to wait for the others.
        endpoint: text about this site for all others.
        key: secret of those that take part; None: the run's.
        note: text of the first site for all.

    Raises:
        UserError: this host's address is public, or processes do not fit together.
        MissingProcessesError: some sites did not come in time; they are named.
    """
    site = island.sites.index(island.site)

    def names(sites: Sequence[int]) -> str:
        return ", ".join(f"site {island.sites[each]}" for each in sites)

    try:
        return rendezvous.join(
            site,
            len(island.sites),
            island.coordinator,
            island.site,
            timeout_seconds,
            own_address(island) if site == 0 else None,
            endpoint,
            island.key.encode() if key is None else key,
            note,
            names,
        )
    except MissingProcessesError as error:
        raise MissingProcessesError(f"{error} ({names(error.missing)})", error.missing) from None


def own_address(island: IslandSettings) -> str:
    """Return the address of this host that the other sites reach.

    Raises:
        UserError: there is none, or strangers reach it.
    """
    address = island.address or address_towards(*HostPort.parse(island.coordinator))
    require_private(address)
    return address


def connect_with(
    joined: Joined, processes: Mapping[int, Sequence[ProcessOfSite]], seconds: float
) -> None:
    """Take up groups, and wait until this process and its counterparts have reached each other.

    Args:
        joined: this process.
        processes: all processes of the site of each group.
        seconds: time for all of it.

    Raises:
        UserError: some process does not fit.
        RunError: one is refused, lost, or late; the message names the port in question.
    """
    transport = joined.transport
    of_groups = {group: joined.peers(group, of_site) for group, of_site in processes.items()}
    for peers in of_groups.values():
        transport.take_up(peers)
    deadline = time.monotonic() + seconds
    for group, peers in of_groups.items():
        for peer, lane in zip(peers, transport.links[group].lanes, strict=True):
            _wait_for(transport, peer, lane.link.control, deadline, seconds)


def _wait_for(
    transport: CarrierTransport,
    peer: Peer,
    control: ControlConnection,
    deadline: float,
    seconds: float,
) -> None:
    """Wait until this process has reached a peer and that has reached this one."""
    site, peer_site = transport.site_names[transport.site], transport.site_names[peer.party.group]
    while not (control.reached.is_set() and control.was_reached.is_set()):
        if control.lost is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        elif not control.reached.is_set():
            host, port = peer.address
            tried = "refused" if control.lost else f"{control.problem}, for {seconds:g} s"
            raise RunError(
                f"transport: {site} cannot reach {peer_site}:{port}, {peer.name} at {host} "
                f"({tried}); is the tunnel up, and do the firewalls let TCP to this port through?"
            )
        elif control.lost is not None:
            raise RunError(f"transport: lost the connection to {peer.name}: {control.lost}")
        else:
            host, port = transport.address
            raise RunError(
                f"transport: {peer.name} has not reached {site}:{port} at {host} within "
                f"{seconds:g} s; do the firewalls let TCP to this port through?"
            )
