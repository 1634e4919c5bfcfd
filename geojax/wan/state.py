"""A running emulated network as data, in a file that `geojax wan up` leaves for other commands.

    wan = EmulatedWan.load()
    for site in wan.sites:
        subprocess.Popen([*site.command_prefix, "hostname", "-i"])     # prints site.address

A command with a site's prefix runs in that site's network namespace and finds its own hostname and
the names of all sites in /etc/hosts, each with the address that the others reach.
"""

import json
import re
from pathlib import Path
from typing import Annotated

import pydantic

from geojax.errors import UserError
from geojax.paths import write_atomically
from geojax.quantities import BytesPerSecond, Seconds
from geojax.settings import Settings, load_settings
from geojax.wan.settings import WanSettings

DEFAULT_NAME = "wan"
"""Name of the emulated network, unless another is given."""

STATE_FOLDER = Path("/run/geojax/wan")
"""Folder with a file for each emulated network. It belongs to the machine, as namespaces do: it is
the same for every shell of root, whatever the environment, and gone after a reboot."""


class EmulatedSite(Settings):
    """One site: a network namespace."""

    name: str
    """Name of the site in the topology."""
    namespace: str
    """Name of its network namespace, as `ip netns` lists it."""
    address: str
    """IPv4 address at which the other sites reach it."""

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """Words before a command that make it run in this site, under the same process id."""
        return ("ip", "netns", "exec", self.namespace)


Core = Annotated[int, pydantic.Field(ge=0, lt=2**16)]
"""CPU core, by the number that the kernel gives it."""


class Relay(Settings):
    """Process that carries the packets of one link."""

    process_id: int = pydantic.Field(ge=1, lt=2**31)
    """Process id of the relay."""
    started: int = pydantic.Field(ge=0, lt=2**63)
    """Start time of the process in clock ticks since boot, which distinguishes it from a later one
    with the same process id."""
    cores: tuple[Core, Core]
    """CPU cores to which its threads are pinned: the one from the first site to the second, and the
    one back."""


class Measurement(Settings):
    """Measurement of one link when it came up."""

    round_trip_seconds: Seconds
    """Median time of a small message and its answer over TCP."""
    bytes_per_second: tuple[BytesPerSecond, BytesPerSecond]
    """Throughput from the first site to the second, and back, one direction at a time."""


class EmulatedLink(Settings):
    """Emulated link between two sites."""

    sites: tuple[str, str]
    """Names of the two sites."""
    relay: Relay | None = None
    """Relay of the link; None if the kernel does everything (an unshaped link, or netem)."""
    measured: Measurement | None = None
    """Measurement of the link; None while it comes up."""


class EmulatedWan(Settings):
    """An emulated network: the sites, and a link between each two of them."""

    name: str
    """Name of this emulated network among those on this machine."""
    settings: WanSettings
    """Requested properties of the links."""
    shaper: str
    """Means by which the links are shaped: `none`, `netem` or `relay`."""
    sites: tuple[EmulatedSite, ...]
    """Sites, in the order of the mesh's dc axis."""
    links: tuple[EmulatedLink, ...]
    """Links, one for each pair of sites."""

    @classmethod
    def load(cls, name: str = DEFAULT_NAME) -> "EmulatedWan":
        """Read the emulated network `name` of this machine, as it was when it came up.

        Raises:
            UserError: there is none of that name.
        """
        path = state_path(name)
        if not path.exists():
            raise UserError(f"no emulated network '{name}' is up; geojax wan up makes one")
        return load_settings(cls, path)

    def save(self) -> None:
        """Write the state file atomically."""
        path = state_path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(self.model_dump(mode="json"), indent=2))

    def site(self, name: str) -> EmulatedSite:
        """Return the site called `name`.

        Raises:
            UserError: there is none of that name.
        """
        for site in self.sites:
            if site.name == name:
                return site
        names = ", ".join(site.name for site in self.sites)
        raise UserError(f"the emulated network '{self.name}' has no site '{name}', only {names}")

    def link(self, name: str) -> EmulatedLink:
        """Return the link called `name`, such as east-west.

        Raises:
            UserError: there is none of that name.
        """
        for link in self.links:
            if name in ("-".join(link.sites), "-".join(reversed(link.sites))):
                return link
        names = ", ".join("-".join(link.sites) for link in self.links)
        raise UserError(f"the emulated network '{self.name}' has no link '{name}', only {names}")


def state_path(name: str) -> Path:
    """Return the path of the state file of the emulated network `name`.

    Raises:
        UserError: that is no valid name.
    """
    if not re.fullmatch(r"[a-z0-9-]{1,32}", name):
        raise UserError(f"'{name}' names no emulated network: lower-case letters, digits, hyphens")
    return STATE_FOLDER / f"{name}.json"
