"""Network namespaces of the sites, by means of iproute2 and setns(2)."""

import contextlib
import ctypes
import dataclasses
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from geojax.errors import RunError, UserError
from geojax.wan.state import EmulatedSite

_NAMESPACES = Path("/run/netns")
_CONFIGURATION = Path("/etc/netns")
_CLONE_NEWNET = 0x40000000


@dataclasses.dataclass(frozen=True)
class SiteTraffic:
    """Bytes that one site has exchanged with the others since its links came up."""

    sent_bytes: int
    """Bytes of IP packets that left. A segment that a network card would cut to the MTU counts
    once, with one header: slightly less than on a wire."""
    received_bytes: int
    """Bytes of IP packets that arrived."""


def call(*command: str) -> str:
    """Run a command of iproute2, `ip` or `tc` with its arguments, and return its output.

    Raises:
        RunError: it fails; the message is its own.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RunError(f"{' '.join(command)}: {words[0]}")
    return done.stdout


def require_namespaces() -> None:
    """Check that network namespaces can be made here.

    Raises:
        UserError: the user is not root, there is no iproute2, or a container lacks the rights.
    """
    if os.geteuid() != 0:
        raise UserError("an emulated link needs root, to make network namespaces: try sudo")
    if shutil.which("ip") is None:
        raise UserError("an emulated link needs the command ip: install iproute2")
    trial = f"geojax.trial.{os.getpid()}"
    try:
        call("ip", "netns", "add", trial)
        with inside(trial):
            pass
    except (RunError, OSError) as error:
        raise UserError(
            f"root may not make network namespaces here ({error}); a container needs the "
            "capabilities SYS_ADMIN and NET_ADMIN"
        ) from None
    finally:
        remove(trial)


def make(site: EmulatedSite, addresses: dict[str, str], tcp_buffer_bytes: int) -> None:
    """Make the namespace of `site`, in which the sites' names resolve to `addresses`.

    A TCP connection may have up to `tcp_buffer_bytes` in each of its buffers, keeps its window when
    idle, and learns nothing from earlier connections.
    """
    call("ip", "netns", "add", site.namespace)
    call("ip", "-n", site.namespace, "link", "set", "lo", "up")
    # `ip netns exec` binds this over /etc/hosts. Gloo listens where the hostname resolves to.
    lines = ["127.0.0.1 localhost", f"{site.address} {socket.gethostname()}"]
    lines += [f"{address} {name}" for name, address in addresses.items()]
    folder = _CONFIGURATION / site.namespace
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    with inside(site.namespace):
        for setting, value in {
            "ipv6/conf/all/disable_ipv6": "1",  # nothing but what is sent crosses a link
            "ipv6/conf/default/disable_ipv6": "1",
            "ipv4/tcp_slow_start_after_idle": "0",
            "ipv4/tcp_no_metrics_save": "1",
            "ipv4/tcp_rmem": f"4096 131072 {tcp_buffer_bytes}",
            "ipv4/tcp_wmem": f"4096 65536 {tcp_buffer_bytes}",
        }.items():
            path = Path("/proc/sys/net") / setting
            if path.exists():  # a kernel may lack IPv6
                _write_setting(path, value)


def _write_setting(path: Path, value: str) -> None:
    try:
        path.write_text(value)
    except OSError as error:
        raise UserError(
            f"{path} of a new namespace cannot be set ({error.strerror}); a container needs a "
            "writable /proc/sys"
        ) from None


def remove(namespace: str) -> bool:
    """Remove a namespace with its devices and its hosts file; return whether anything was there."""
    found = False
    if (_NAMESPACES / namespace).exists():
        call("ip", "netns", "delete", namespace)
        found = True
    folder = _CONFIGURATION / namespace
    if folder.exists():
        shutil.rmtree(folder)
        found = True
        with contextlib.suppress(OSError):  # it holds other files, or is already gone
            _CONFIGURATION.rmdir()
    return found


def names_beginning(prefix: str) -> list[str]:
    """List the namespaces, complete or half made, whose names begin with `prefix`."""
    folders = [folder for folder in (_NAMESPACES, _CONFIGURATION) if folder.is_dir()]
    found = {path.name for folder in folders for path in folder.iterdir()}
    return sorted(name for name in found if name.startswith(prefix))


def processes_in(namespace: str) -> Sequence[int]:
    """List the processes that run in a namespace."""
    if not (_NAMESPACES / namespace).exists():
        return []
    return [int(line) for line in call("ip", "netns", "pids", namespace).split()]


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Move this thread into the namespace; sockets and devices that it opens there stay there.

    Raises:
        OSError: there is no such namespace, or no right to enter it.
    """
    with open("/proc/thread-self/ns/net") as home, open(_NAMESPACES / namespace) as target:
        _enter(target.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    # os.setns begins with Python 3.12.
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def traffic(namespace: str) -> SiteTraffic:
    """Read the byte counters of a namespace's interfaces, except the loopback.

    Raises:
        RunError: there is no such namespace any more.
    """
    try:
        with inside(namespace):
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    except FileNotFoundError:
        raise RunError(f"the namespace {namespace} is gone: the emulated link went down") from None
    counters = {name.strip(): rest.split() for name, rest in (line.split(":") for line in lines)}
    counters.pop("lo", None)
    return SiteTraffic(
        sent_bytes=sum(int(fields[8]) for fields in counters.values()),
        received_bytes=sum(int(fields[0]) for fields in counters.values()),
    )


def congestion_control(site: EmulatedSite) -> str:
    """Return TCP's congestion control in a site, which is that of the machine."""
    with inside(site.namespace):
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
