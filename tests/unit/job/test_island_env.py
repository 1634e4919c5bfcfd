"""The variables of sites that are jobs of their own."""

import pytest

from geojax.errors import UserError
from geojax.job.island_env import (
    VARIABLES,
    first_port_of,
    island_env,
    island_settings,
)

MEETINGS = "10.0.0.1:6000", "10.0.0.2:6000"
GIVEN = island_env(("east", "west"), MEETINGS, "10.0.0.2", 61400)
GIVEN |= {"GEOJAX_KEY": "k" * 32}


def test_a_launcher_writes_them_as_a_process_reads_them():
    settings = island_settings(GIVEN | {"GEOJAX_SITE": "west"})
    assert (settings.site, settings.sites) == ("west", ("east", "west"))
    assert settings.coordinators == MEETINGS
    assert settings.coordinator == "10.0.0.1:6000"
    assert (settings.key, settings.address) == ("k" * 32, "10.0.0.2")
    assert settings.port == 61400
    assert island_settings(GIVEN | {"GEOJAX_SITE": "west", VARIABLES["port"]: ""}).port is None
    assert island_settings(GIVEN | {"GEOJAX_SITE": "west"}, site="east").site == "east"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({VARIABLES["sites"]: ""}, "jobs of their own, each with GEOJAX_ISLANDS"),
        ({VARIABLES["key"]: "short"}, "key: has 5 characters; a key has 16 to 64"),
        ({VARIABLES["key"]: "short and blank in it"}, "key: has 21 characters"),
        ({VARIABLES["coordinators"]: "127.0.0.1:99999"}, "its port is no number from 1 to 65535"),
        (
            {VARIABLES["coordinators"]: "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"},
            "coordinators: 3 of 2 sites; give the one of each site",
        ),
        ({VARIABLES["sites"]: "../../esc,west"}, "'../../esc' is no name of a site"),
        ({VARIABLES["sites"]: "east, west"}, "' west' is no name of a site"),
        ({VARIABLES["site"]: "a/b"}, "'a/b' is no name of a site"),
        ({VARIABLES["address"]: "127.0.0.1:5"}, "give one without a port"),
        ({VARIABLES["address"]: "127.0.0.1\n"}, "is no host's name"),
        ({VARIABLES["address"]: "127.1"}, "is no IPv4 address"),
        (
            {VARIABLES["address"]: "nowhere.invalid"},
            "GEOJAX_ISLANDS_ADDRESS=nowhere.invalid: this host knows no address of that name (",
        ),
        ({VARIABLES["coordinators"]: "10.0.0.1"}, "coordinator"),
        ({VARIABLES["site"]: "north"}, "site north must be one of the sites"),
        ({VARIABLES["port"]: "many"}, "GEOJAX_ISLANDS_PORT='many': is no port"),
        ({VARIABLES["port"]: "1\n2"}, "GEOJAX_ISLANDS_PORT='1\\n2': is no port"),
        ({VARIABLES["port"]: "٣٣٣٣"}, "is no port"),
        ({VARIABLES["port"]: "0"}, "is no port"),
        ({VARIABLES["port"]: "65536"}, "give a number from 1 to 65535"),
        ({VARIABLES["sites"]: "west,west"}, "different names; got west, west"),
    ],
)
def test_what_is_missing_or_wrong_is_named_in_one_line(changes, problem):
    with pytest.raises(UserError) as error:
        island_settings(GIVEN | {"GEOJAX_SITE": "west"} | changes)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
    assert "short" not in str(error.value), "a key is shown to nobody"


def test_the_name_of_a_host_stands_for_its_address():
    given = GIVEN | {"GEOJAX_SITE": "west", VARIABLES["address"]: "localhost"}
    assert island_settings(given).address == "127.0.0.1"
    assert "k" * 32 not in repr(island_settings(given))


def test_a_later_site_of_a_host_has_the_ports_after_those_of_the_earlier_ones():
    assert first_port_of(GIVEN, 2) == 61402
    assert first_port_of({}, 2) is None
    with pytest.raises(UserError, match="give a number from 1 to 65533"):
        first_port_of({VARIABLES["port"]: "65534"}, 2)
