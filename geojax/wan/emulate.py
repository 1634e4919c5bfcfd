"""Emulated networks: brought up, taken down, cut, restored, and checked."""

import contextlib
import fcntl
import itertools
import os
import re
import shutil
from collections.abc import Iterator

from geojax.errors import RunError, UserError
from geojax.wan import namespaces, relay
from geojax.wan.measure import measured
from geojax.wan.namespaces import SiteTraffic, call
from geojax.wan.settings import MTU, SITE_NAMES, WanSettings
from geojax.wan.state import (
    DEFAULT_NAME,
    STATE_FOLDER,
    EmulatedLink,
    EmulatedSite,
    EmulatedWan,
    Relay,
    state_path,
)

_LEAST_TCP_BUFFER, _LARGEST_TCP_BUFFER = 2**24, 2**30
_QUEUE_PACKETS = 10_000


def bring_up(
    settings: WanSettings, name: str = DEFAULT_NAME, core: int | None = None
) -> EmulatedWan:
    """Make sites and links, after removing what a crash left, and measure the links.

    An unshaped link is a veth pair. A shaped link is a veth pair with netem on both ends, if the
    kernel has netem. Otherwise it is a pair of TUN devices with a relay process between them. The
    relay is pinned to `core`; None pins each direction to one of the last two cores that this
    process may use.

    Raises:
        UserError: it is up already, or this machine or user cannot make one.
        RunError: iproute2 refuses something, or a link does not carry what is sent.
    """
    namespaces.require_namespaces()
    cores = _relay_cores(core)
    with _locked():
        if state_path(name).exists() and not problems(EmulatedWan.load(name)):
            raise UserError(
                f"the emulated network '{name}' is up already; geojax wan down --name {name} takes "
                "it down"
            )
        _remove(name)
        wan = _plan(settings, name)
        wan.save()  # before anything exists, so that what a crash leaves is known
        try:
            wan = measured(_make(wan, cores))
            wan.save()
            return wan
        except BaseException:
            _remove(name)
            raise


def take_down(name: str = DEFAULT_NAME) -> list[str]:
    """Remove relays, namespaces and state; return the names of what was removed.

    Raises:
        UserError: not root.
    """
    if os.geteuid() != 0:
        raise UserError("taking an emulated link down needs root: try sudo")
    with _locked():
        return _remove(name)


def reshape(wan: EmulatedWan, settings: WanSettings) -> EmulatedWan:
    """Give shaped links other properties while processes talk over them; return the network.

    What is on its way is lost, and connections stay: TCP sends it again.

    Args:
        wan: the network.
        settings: of as many sites; its links must have a delay, a rate or loss too.

    Raises:
        RunError: a namespace is gone, or the user is not root.
    """
    assert wan.settings.shaped, "an unshaped link has nothing to change"
    assert settings.shaped, "a link that was shaped stays so"
    with _locked():
        wan = wan.model_copy(update={"settings": settings})
        if wan.shaper == "netem":
            for link in wan.links:
                for site, device, _ in _ends(wan, link):
                    change = ["qdisc", "replace", "dev", device, "root", *netem_arguments(settings)]
                    call("tc", "-n", site.namespace, *change)
        else:
            starts = []
            for link in wan.links:
                assert link.relay is not None, "a link that the kernel does not shape has a relay"
                relay.stop(link.relay)  # and its devices are gone
                starts.append(_join_by_relay(wan, link, link.relay.cores))
            wan = _with_relays(wan, [start.relay for start in starts])
            for start in starts:
                start.begin()
        wan.save()
    return wan


def running(name: str = DEFAULT_NAME) -> EmulatedWan:
    """Return the emulated network `name`, after checking that nothing of it is broken.

    Raises:
        UserError: it is not up, or broken.
    """
    wan = EmulatedWan.load(name)
    broken = problems(wan)
    if broken:
        raise UserError(
            f"the emulated network '{name}' is broken: {broken[0]}; geojax wan up makes it anew"
        )
    return wan


def problems(wan: EmulatedWan) -> list[str]:
    """List what is broken in an emulated network, a phrase each."""
    existing = set(namespaces.names_beginning(_prefix(wan.name)))
    found = [
        f"the namespace {site.namespace} is gone"
        for site in wan.sites
        if site.namespace not in existing
    ]
    for link in wan.links:
        if link.measured is None:
            found.append(f"the link {'-'.join(link.sites)} was never finished")
        elif link.relay is not None and not relay.is_running(link.relay):
            found.append(f"the relay of the link {'-'.join(link.sites)} has ended")
    return found


def traffic(wan: EmulatedWan) -> dict[str, SiteTraffic]:
    """Count the bytes that each site has sent to and received from the others, by its name.

    Raises:
        RunError: a namespace is gone.
    """
    return {site.name: namespaces.traffic(site.namespace) for site in wan.sites}


def cut(wan: EmulatedWan, link: EmulatedLink) -> None:
    """Drop all packets on a link; connections over it stay open and receive nothing.

    Raises:
        RunError: a namespace is gone, or the user is not root.
    """
    _set_devices(wan, link, "down")


def restore(wan: EmulatedWan, link: EmulatedLink) -> None:
    """Let a link that was cut carry packets again.

    Raises:
        RunError: a namespace is gone, or the user is not root.
    """
    _set_devices(wan, link, "up")


def is_cut(wan: EmulatedWan, link: EmulatedLink) -> bool:
    """Return whether a link carries nothing because of `cut`.

    Raises:
        RunError: a namespace is gone.
    """
    shown = [
        call("ip", "-n", site.namespace, "-o", "link", "show", "dev", device)
        for site, device, _ in _ends(wan, link)
    ]
    return not all("UP" in re.split("[<,>]", line) for line in shown)


def netem_arguments(settings: WanSettings) -> list[str]:
    """Return the words after `tc qdisc add dev DEVICE root` for one end of a link, one direction.

    netem's queue is counted in packets, both those that wait and those that are on the way.
    """
    arguments = ["netem", "delay", f"{round(settings.delay_seconds * 1e6)}us"]
    if settings.jitter_seconds:
        arguments.append(f"{round(settings.jitter_seconds * 1e6)}us")
    if settings.loss:
        arguments += ["loss", f"{settings.loss:.6%}"]
    if settings.bytes_per_second is not None:
        arguments += ["rate", f"{round(settings.bytes_per_second * 8)}bit"]
    elif settings.jitter_seconds:  # only with a rate does netem keep the order
        arguments += ["rate", "100gbit"]
    queued_bytes = settings.queue_limit + settings.bandwidth_delay_product // 2
    return [*arguments, "limit", str(-(-queued_bytes // MTU))]


def _prefix(name: str) -> str:
    return f"geojax.{name}."


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Keep other processes from bringing up, measuring or taking down a network meanwhile."""
    STATE_FOLDER.mkdir(parents=True, exist_ok=True)
    folder = os.open(STATE_FOLDER, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _plan(settings: WanSettings, name: str) -> EmulatedWan:
    names = SITE_NAMES[: settings.sites]
    return EmulatedWan(
        name=name,
        settings=settings,
        shaper="relay" if settings.shaped else "none",
        sites=tuple(
            EmulatedSite(name=site, namespace=_prefix(name) + site, address=f"10.77.0.{number}")
            for number, site in enumerate(names, 1)
        ),
        links=tuple(EmulatedLink(sites=pair) for pair in itertools.combinations(names, 2)),
    )


def _relay_cores(core: int | None) -> tuple[int, int]:
    """Return the cores of a relay's two directions: `core` for both, or the last two there are."""
    usable = sorted(os.sched_getaffinity(0))
    if core is None:
        last_two = usable[-2:]  # one, where there is no other
        return last_two[0], last_two[-1]
    if core not in usable:
        raise UserError(f"core {core} is not among those of this process, {usable}")
    return core, core


def _make(wan: EmulatedWan, cores: tuple[int, int]) -> EmulatedWan:
    """Make the namespaces, then the links; each is in the state file before it takes effect."""
    settings = wan.settings
    # Twice what may be on its way or wait, twice because the kernel counts its own overhead.
    buffer = 4 * (settings.bandwidth_delay_product + settings.queue_limit)
    buffer = min(max(buffer, _LEAST_TCP_BUFFER), _LARGEST_TCP_BUFFER)
    for site in wan.sites:
        addresses = {each.name: each.address for each in wan.sites}
        namespaces.make(site, addresses, buffer)
    if settings.shaped and _kernel_has_netem(wan.sites[0].namespace):
        wan = wan.model_copy(update={"shaper": "netem"})
        wan.save()
    if wan.shaper != "relay":
        for link in wan.links:
            _join_by_kernel(wan, link)
        return wan
    relay.compiled()  # a compiler that is missing is said once, before there are devices
    starts = [_join_by_relay(wan, link, cores) for link in wan.links]
    wan = _with_relays(wan, [start.relay for start in starts])
    wan.save()
    for start in starts:
        start.begin()
    return wan


def _with_relays(wan: EmulatedWan, relays: list[Relay]) -> EmulatedWan:
    links = [
        link.model_copy(update={"relay": each})
        for link, each in zip(wan.links, relays, strict=True)
    ]
    return wan.model_copy(update={"links": tuple(links)})


def _ends(wan: EmulatedWan, link: EmulatedLink) -> list[tuple[EmulatedSite, str, str]]:
    """Return for both ends of a link the site, its device, and the address of the other site."""
    first, second = (wan.site(name) for name in link.sites)
    return [
        (first, f"to-{second.name}", second.address),
        (second, f"to-{first.name}", first.address),
    ]


def _set_devices(wan: EmulatedWan, link: EmulatedLink, state: str) -> None:
    for site, device, _ in _ends(wan, link):
        call("ip", "-n", site.namespace, "link", "set", device, state)


def _kernel_has_netem(namespace: str) -> bool:
    if shutil.which("tc") is None:
        return False
    try:
        call("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem")
    except RunError:
        return False
    call("tc", "-n", namespace, "qdisc", "delete", "dev", "lo", "root")
    return True


def _join_by_kernel(wan: EmulatedWan, link: EmulatedLink) -> None:
    (first, device, _), (second, peer, _) = _ends(wan, link)
    veth = ["link", "add", device, "type", "veth", "peer", "name", peer, "netns", second.namespace]
    call("ip", "-n", first.namespace, *veth)
    _address(wan, link)
    for site, device, _ in _ends(wan, link):
        if wan.shaper == "netem":
            discipline = netem_arguments(wan.settings)
            call("tc", "-n", site.namespace, "qdisc", "add", "dev", device, "root", *discipline)
        if wan.settings.loss:  # packets get lost one by one
            call("ip", "-n", site.namespace, "link", "set", device, "gso_max_segs", "1")


def _join_by_relay(
    wan: EmulatedWan, link: EmulatedLink, cores: tuple[int, int]
) -> relay.RelayStart:
    (first, device, _), (second, peer, _) = _ends(wan, link)
    # A lost packet is one of at most the MTU, so whole segments are only for links without loss.
    whole_segments = wan.settings.loss == 0
    descriptors = (
        relay.open_device(first.namespace, device, whole_segments),
        relay.open_device(second.namespace, peer, whole_segments),
    )
    _address(wan, link)
    return relay.RelayStart(descriptors, wan.settings, cores, STATE_FOLDER / f"{wan.name}.log")


def _address(wan: EmulatedWan, link: EmulatedLink) -> None:
    for site, device, other in _ends(wan, link):
        inside = ["ip", "-n", site.namespace]
        queue = ["mtu", str(MTU), "txqueuelen", str(_QUEUE_PACKETS)]
        call(*inside, "link", "set", device, *queue)
        call(*inside, "address", "add", site.address, "peer", other, "dev", device)
        call(*inside, "link", "set", device, "up")


def _remove(name: str) -> list[str]:
    removed = []
    path = state_path(name)
    if path.exists():
        for link in EmulatedWan.load(name).links:
            if link.relay is not None and relay.stop(link.relay):
                removed.append(f"the relay of {'-'.join(link.sites)}")
    for namespace in namespaces.names_beginning(_prefix(name)):
        processes = namespaces.processes_in(namespace)
        if namespaces.remove(namespace):
            orphans = f", in which {len(processes)} processes still run" if processes else ""
            removed.append(f"the namespace {namespace}{orphans}")
    for leftover in (path, path.with_suffix(".draft"), path.with_suffix(".log")):
        leftover.unlink(missing_ok=True)
    return removed
