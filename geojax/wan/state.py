"""A running emulated network, as data: what `geojax wan up` leaves for everyone else to read.

    wan = EmulatedWan.load()
    for site in wan.sites:
        subprocess.Popen([*site.command_prefix, "hostname", "-i"])     # prints site.address

A command with a site's prefix runs in that site's network namespace and finds its own hostname and
the names of all sites in /etc/hosts, each with the address that the others reach.
"""

import json
import os
import re
from pathlib import Path

from geojax.errors import UserError
from geojax.settings import Settings, load_yaml, validate
from geojax.wan.settings import WanSettings

DEFAULT_NAME = "wan"
"""Of the emulated network, where nobody gave it another."""

STATE_FOLDER = Path("/run/geojax/wan")
"""A file for each emulated network. Namespaces belong to the machine and end with it, so does this:
it must be the same for every shell of root, whatever the environment says, and be gone at boot."""


class EmulatedSite(Settings):
    """One site: a network namespace."""

    name: str
    """What the topology calls it."""
    namespace: str
    """Name of its network namespace, as `ip netns` lists it."""
    address: str
    """The IPv4 address where the other sites reach it."""

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """To be put before a command that shall run in this site; its process id stays the same."""
        return ("ip", "netns", "exec", self.namespace)


class Relay(Settings):
    """The process that carries the packets of one link."""

    process_id: int
    """Of the relay."""
    started: int
    """When that process started, in clock ticks since the machine did: tells it from a later
    process with the same number."""
    core: int
    """The core that it is pinned to."""


class Measurement(Settings):
    """What was measured over one link when it came up."""

    round_trip_seconds: float
    """Median of a small message and its answer over TCP."""
    bytes_per_second: tuple[float, float]
    """What got from the first site to the second, and back, one direction at a time."""


class EmulatedLink(Settings):
    """What joins two sites."""

    sites: tuple[str, str]
    """Names of the two sites."""
    relay: Relay | None = None
    """None where the kernel does everything: an unshaped link, or netem."""
    measured: Measurement | None = None
    """None while it comes up."""


class EmulatedWan(Settings):
    """An emulated network: the sites, and a link between each two of them."""

    name: str
    """Of this emulated network among those on this machine."""
    settings: WanSettings
    """What was asked for."""
    shaper: str
    """What shapes the links: `none`, `netem` or `relay`."""
    sites: tuple[EmulatedSite, ...]
    """In the order of the mesh's dc axis."""
    links: tuple[EmulatedLink, ...]
    """One for each pair of sites."""

    @classmethod
    def load(cls, name: str = DEFAULT_NAME) -> "EmulatedWan":
        """The emulated network `name` of this machine, as it was when it came up.

        Raises:
            UserError: there is none of that name.
        """
        path = state_path(name)
        if not path.exists():
            raise UserError(f"no emulated network '{name}' is up; geojax wan up makes one")
        return validate(cls, load_yaml(path), str(path))

    def save(self) -> None:
        """Write the state file, in one step."""
        path = state_path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(self.model_dump(mode="json"), indent=2))
        os.replace(draft, path)

    def site(self, name: str) -> EmulatedSite:
        """The site called `name`.

        Raises:
            UserError: there is none of that name.
        """
        for site in self.sites:
            if site.name == name:
                return site
        names = ", ".join(site.name for site in self.sites)
        raise UserError(f"the emulated network '{self.name}' has no site '{name}', only {names}")

    def link(self, name: str) -> EmulatedLink:
        """The link called `name`, such as east-west.

        Raises:
            UserError: there is none of that name.
        """
        for link in self.links:
            if name in ("-".join(link.sites), "-".join(reversed(link.sites))):
                return link
        names = ", ".join("-".join(link.sites) for link in self.links)
        raise UserError(f"the emulated network '{self.name}' has no link '{name}', only {names}")


def state_path(name: str) -> Path:
    """The state file of the emulated network `name`.

    Raises:
        UserError: that is no name.
    """
    if not re.fullmatch(r"[a-z0-9-]{1,32}", name):
        raise UserError(f"'{name}' names no emulated network: lower-case letters, digits, hyphens")
    return STATE_FOLDER / f"{name}.json"
