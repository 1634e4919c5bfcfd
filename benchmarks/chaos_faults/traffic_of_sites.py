"""Traffic of a process's network namespace: bytes that it has sent, and resets."""

from collections.abc import Sequence
from pathlib import Path

from geojax.wan.namespaces import call


def sent_bytes(process: int) -> int:
    """Return the bytes that the namespace of a process has sent.

    Its loopback counts where it has no other device, as where all sites share one.
    """
    devices = {}
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        devices[name.strip()] = int(counters.split()[8])
    loopback = devices.pop("lo", 0)
    return sum(devices.values()) if set(devices) == {"eth0"} else loopback


def reset_connections(address: str, where: Sequence[str] = ()) -> int:
    """Reset all established connections to an address; return their number. Needs root.

    Args:
        address: of the other end.
        where: words before a command that runs in the namespace.
    """
    chosen = ["state", "established", "dst", address]
    return len(call(*where, "ss", "--kill", "--no-header", "--tcp", *chosen).splitlines())
