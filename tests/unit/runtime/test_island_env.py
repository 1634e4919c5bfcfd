"""The variables of sites that are jobs of their own."""

import pytest

from geojax.errors import UserError
from geojax.runtime.environment.island_env import VARIABLES, island_env, island_settings

GIVEN = island_env(("east", "west"), "10.0.0.1:6000", "k" * 32, "10.0.0.2")


def test_a_launcher_writes_them_as_a_process_reads_them():
    settings = island_settings(GIVEN | {"GEOJAX_SITE": "west"})
    assert (settings.site, settings.sites) == ("west", ("east", "west"))
    assert settings.coordinator == "10.0.0.1:6000"
    assert (settings.key, settings.address) == ("k" * 32, "10.0.0.2")
    assert island_settings(GIVEN | {"GEOJAX_SITE": "west"}, site="east").site == "east"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({VARIABLES["sites"]: ""}, "jobs of their own, each with GEOJAX_ISLANDS"),
        ({VARIABLES["key"]: "short"}, "key"),
        ({VARIABLES["coordinator"]: "10.0.0.1"}, "coordinator"),
        ({VARIABLES["site"]: "north"}, "site north must be one of the sites"),
        ({VARIABLES["sites"]: "west,west"}, "different names; got west, west"),
    ],
)
def test_what_is_missing_or_wrong_is_named_in_one_line(changes, problem):
    with pytest.raises(UserError) as error:
        island_settings(GIVEN | {"GEOJAX_SITE": "west"} | changes)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
