import pytest

from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.networks import SiteNetworks
from geojax.topology import Site

SITE = Site.model_validate(
    {
        "name": "east",
        "hosts": 8,
        "accelerators_per_host": 8,
        "accelerator": "h100-sxm",
        "inside_host": {"round_trip_seconds": 2e-6, "bytes_per_second": 400e9},
        "between_hosts": {"round_trip_seconds": 10e-6, "bytes_per_second": 50e9},
    }
)
PLAIN = Calibration(inside_host=1.0, between_hosts=1.0)


def networks(**sizes):
    axes = {"dc": 1, "stage": 1, "data": 1, "expert": 1, "context": 1, "tensor": 1}
    return SiteNetworks(SITE, axes | sizes, PLAIN)


def test_ranks_of_one_host_talk_over_its_own_network():
    group = networks(data=8, tensor=8).group(("tensor",))
    assert (group.network, group.ranks) == ("inside_host", 8)
    assert group.seconds(400e9) == pytest.approx(1 + 7 * 1e-6 * 6 / 7, abs=2e-6)


@pytest.mark.parametrize(("tensor", "cards"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_a_ring_leaves_a_host_over_the_cards_of_its_members(tensor, cards):
    group = networks(data=64 // tensor, tensor=tensor).group(("data",))
    assert group.network == "between_hosts"
    assert group.bytes_per_second == min(cards * 50e9, 400e9)


def test_many_ranks_take_a_tree_and_not_as_many_steps():
    assert networks(data=64).group(("data",)).steps == 12
    assert networks(data=4, tensor=8).group(("data",)).steps == 3


def test_a_catalog_stands_in_for_networks_that_are_not_described():
    bare = SITE.model_copy(update={"inside_host": None, "between_hosts": None})
    made = SiteNetworks(bare, networks(data=8, tensor=8).sizes, PLAIN)
    assert made.group(("tensor",)).bytes_per_second == 450e9
    assert made.group(("data",)).bytes_per_second == 50e9
