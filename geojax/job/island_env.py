"""The place of this process's site among sites that are jobs of their own, from the environment.

| setting      | variable                    |
|--------------|-----------------------------|
| site         | GEOJAX_SITE                 |
| sites        | GEOJAX_ISLANDS              |
| coordinators | GEOJAX_ISLANDS_COORDINATORS |
| key          | GEOJAX_KEY                  |
| address      | GEOJAX_ISLANDS_ADDRESS      |
| port         | GEOJAX_ISLANDS_PORT         |

All but the site, the address and the port are the same in every process of every site.
`geojax launch --islands` sets them; jobs of several schedulers are given them by hand.
"""

import re
from collections.abc import Mapping, Sequence

import pydantic

from geojax.errors import UserError
from geojax.job.cluster_env import FIRST_PORT, Key
from geojax.job.cluster_env import VARIABLES as PROCESS_VARIABLES
from geojax.network_names import LAST_PORT, Host, HostAndPort, Port, SiteName, address_of
from geojax.settings import Settings, validate


class IslandSettings(Settings):
    """The sites of a run that are jobs of their own, and this one among them."""

    site: SiteName
    """Name of the site where this process runs."""
    sites: tuple[SiteName, ...] = pydantic.Field(min_length=2)
    """Names of all sites, in order."""
    coordinators: tuple[HostAndPort, ...] = pydantic.Field(min_length=1)
    """host:port of process 0 of each site, in order, as the other sites reach it. All sites start
    at the first one, which alone is enough where no site returns to a run."""
    key: Key = pydantic.Field(repr=False)
    """Secret that all processes of the run share."""
    address: Host | None = None
    """Address of this host that the other sites reach, that of its tunnel to them; None: the one
    from which packets to the coordinator leave."""
    port: Port | None = None
    """Port at which the first process of the site on a host is reached by other sites, the next one
    at the port after it, and so on; None: any that is free."""

    @pydantic.model_validator(mode="after")
    def _is_one_of_them(self) -> "IslandSettings":
        if self.site not in self.sites or len(set(self.sites)) < len(self.sites):
            raise ValueError(
                f"site {self.site} must be one of the sites, which have different names; got "
                f"{', '.join(self.sites)}"
            )
        if len(self.coordinators) not in (1, len(self.sites)):
            raise ValueError(
                f"coordinators: {len(self.coordinators)} of {len(self.sites)} sites; give the one "
                "of each site, in the order of the sites, or that of the first alone"
            )
        return self

    @property
    def coordinator(self) -> str:
        """The host:port at which all sites start."""
        return self.coordinators[0]


VARIABLES = {
    "site": PROCESS_VARIABLES["site"],
    "sites": "GEOJAX_ISLANDS",
    "coordinators": "GEOJAX_ISLANDS_COORDINATORS",
    "key": PROCESS_VARIABLES["key"],
    "address": "GEOJAX_ISLANDS_ADDRESS",
    "port": "GEOJAX_ISLANDS_PORT",
}
"""Environment variable of each setting."""

ISLANDS_PORT = FIRST_PORT - 1
"""Port where the processes of all sites meet unless another is given; a site's own job has its."""


def island_settings(environment: Mapping[str, str], site: str | None = None) -> IslandSettings:
    """Read the settings from `environment`; `site` comes before its variable.

    Raises:
        UserError: a variable is missing or wrong; the message names it.
    """
    found = {name: environment.get(variable) for name, variable in VARIABLES.items()}
    found["site"] = site or found["site"]
    missing = [
        VARIABLES[name]
        for name, value in found.items()
        if not value and name not in ("address", "port")
    ]
    if missing:
        raise UserError(
            "dc.join=islands: start the sites with geojax launch --islands, or, as jobs of their "
            f"own, each with {', '.join(missing)}"
        )
    given = {
        **found,
        "sites": str(found["sites"]).split(","),
        "coordinators": str(found["coordinators"]).split(","),
        "address": found["address"] or None,
        "port": first_port_of(environment),
    }
    settings = validate(IslandSettings, given, "GEOJAX_ISLANDS variables")
    if settings.address is None:
        return settings
    try:
        return settings.model_copy(update={"address": address_of(settings.address)})
    except OSError as error:
        raise UserError(
            f"{VARIABLES['address']}={settings.address}: this host knows no address of that name "
            f"({error.strerror}); give the address of this host in its tunnel to the other sites"
        ) from None


def first_port_of(environment: Mapping[str, str], earlier: int = 0) -> int | None:
    """Read the port of a site's first process on a host from `environment`; None: it names none.

    Args:
        environment: variables of the process, or of the launcher for all sites.
        earlier: processes of earlier sites on the same host.

    Raises:
        UserError: it is no port.
    """
    name = VARIABLES["port"]
    if not (text := environment.get(name)):
        return None
    last = LAST_PORT - earlier
    if not re.fullmatch("[0-9]{1,5}", text) or not 1 <= int(text) <= last:
        raise UserError(f"{name}={text[:20]!r}: is no port; give a number from 1 to {last}")
    return int(text) + earlier


def island_env(
    sites: tuple[str, ...],
    coordinators: Sequence[str],
    address: str | None,
    port: int | None = None,
) -> dict[str, str]:
    """Return the variables that tell a worker about all sites; every run has `site` and `key`."""
    found = {
        "sites": ",".join(sites),
        "coordinators": ",".join(coordinators),
        "address": address,
        "port": None if port is None else str(port),
    }
    return {VARIABLES[name]: value for name, value in found.items() if value is not None}
