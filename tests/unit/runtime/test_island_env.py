"""The variables of sites that are jobs of their own."""

import pytest

from geojax.errors import UserError
from geojax.runtime.environment.island_env import (
    VARIABLES,
    guard_port,
    island_env,
    island_settings,
)

GIVEN = island_env(("east", "west"), "10.0.0.1:6000", "10.0.0.2", 61400)
GIVEN |= {"GEOJAX_KEY": "k" * 32}


def test_a_launcher_writes_them_as_a_process_reads_them():
    settings = island_settings(GIVEN | {"GEOJAX_SITE": "west"})
    assert (settings.site, settings.sites) == ("west", ("east", "west"))
    assert settings.coordinator == "10.0.0.1:6000"
    assert (settings.key, settings.address) == ("k" * 32, "10.0.0.2")
    assert settings.port == 61400
    assert island_settings(GIVEN | {"GEOJAX_SITE": "west", VARIABLES["port"]: ""}).port is None
    assert island_settings(GIVEN | {"GEOJAX_SITE": "west"}, site="east").site == "east"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({VARIABLES["sites"]: ""}, "jobs of their own, each with GEOJAX_ISLANDS"),
        ({VARIABLES["key"]: "short"}, "key"),
        ({VARIABLES["coordinator"]: "10.0.0.1"}, "coordinator"),
        ({VARIABLES["site"]: "north"}, "site north must be one of the sites"),
        ({VARIABLES["port"]: "many"}, "GEOJAX_ISLANDS_PORT=many: is no port for 1 processes"),
        ({VARIABLES["port"]: "65536"}, "give a number from 1 to 65535"),
        ({VARIABLES["sites"]: "west,west"}, "different names; got west, west"),
    ],
)
def test_what_is_missing_or_wrong_is_named_in_one_line(changes, problem):
    with pytest.raises(UserError) as error:
        island_settings(GIVEN | {"GEOJAX_SITE": "west"} | changes)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_later_site_of_a_host_has_the_ports_after_those_of_the_earlier_ones():
    assert guard_port(GIVEN, 2) == 61402
    assert guard_port({}, 2) is None
    with pytest.raises(UserError, match="give a number from 1 to 65533"):
        guard_port({VARIABLES["port"]: "65534"}, 2)
