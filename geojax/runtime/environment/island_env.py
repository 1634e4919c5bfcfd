"""The place of this process's site among sites that are jobs of their own, from the environment.

| setting     | variable                   |
|-------------|----------------------------|
| site        | GEOJAX_SITE                |
| sites       | GEOJAX_ISLANDS             |
| coordinator | GEOJAX_ISLANDS_COORDINATOR |
| key         | GEOJAX_ISLANDS_KEY         |
| address     | GEOJAX_ISLANDS_ADDRESS     |

All but the site and the address are the same in every process of every site. `geojax launch
--islands` sets them; jobs of several schedulers are given them by hand.
"""

from collections.abc import Mapping

import pydantic

from geojax.errors import UserError
from geojax.runtime.environment.cluster_env import FIRST_PORT
from geojax.runtime.environment.cluster_env import VARIABLES as PROCESS_VARIABLES
from geojax.settings import Settings, validate


class IslandSettings(Settings):
    """The sites of a run that are jobs of their own, and this one among them."""

    site: str
    """Name of the site where this process runs."""
    sites: tuple[str, ...] = pydantic.Field(min_length=2)
    """Names of all sites, in order."""
    coordinator: str = pydantic.Field(pattern=r"^\S+:\d+$")
    """host:port of process 0 of the first site, as the other sites reach it."""
    key: str = pydantic.Field(min_length=16, max_length=64, pattern=r"^[!-~]+$")
    """Secret that all processes of the run share."""
    address: str | None = None
    """Address of this host that the other sites reach, that of its tunnel to them; None: the one
    from which packets to the coordinator leave."""

    @pydantic.model_validator(mode="after")
    def _is_one_of_them(self) -> "IslandSettings":
        if self.site not in self.sites or len(set(self.sites)) < len(self.sites):
            raise ValueError(
                f"site {self.site} must be one of the sites, which have different names; got "
                f"{', '.join(self.sites)}"
            )
        return self


VARIABLES = {
    "site": PROCESS_VARIABLES["site"],
    "sites": "GEOJAX_ISLANDS",
    "coordinator": "GEOJAX_ISLANDS_COORDINATOR",
    "key": "GEOJAX_ISLANDS_KEY",
    "address": "GEOJAX_ISLANDS_ADDRESS",
}
"""Environment variable of each setting."""

KEY_VARIABLE = VARIABLES["key"]

ISLANDS_PORT = FIRST_PORT - 1
"""Port where the processes of all sites meet unless another is given; a site's own job has its."""


def island_settings(environment: Mapping[str, str], site: str | None = None) -> IslandSettings:
    """Read the settings from `environment`; `site` comes before its variable.

    Raises:
        UserError: a variable is missing or wrong; the message names it.
    """
    found = {name: environment.get(variable) for name, variable in VARIABLES.items()}
    found["site"] = site or found["site"]
    missing = [VARIABLES[name] for name, value in found.items() if not value and name != "address"]
    if missing:
        raise UserError(
            "dc.join=islands: start the sites with geojax launch --islands, or, as jobs of their "
            f"own, each with {', '.join(missing)}"
        )
    given = {**found, "sites": str(found["sites"]).split(","), "address": found["address"] or None}
    return validate(IslandSettings, given, "GEOJAX_ISLANDS variables")


def island_env(
    sites: tuple[str, ...], coordinator: str, key: str | None, address: str | None
) -> dict[str, str]:
    """Return the variables that tell a worker about all sites; `site` has its own.

    A `key` of None is told in another way.
    """
    found = {"sites": ",".join(sites), "coordinator": coordinator, "key": key, "address": address}
    return {VARIABLES[name]: value for name, value in found.items() if value is not None}
