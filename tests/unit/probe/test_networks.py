import jax
import pytest

from geojax.errors import UserError
from geojax.probe.context import ProbeContext
from geojax.probe.figures import CollectiveFigures
from geojax.probe.networks import bus_bandwidth, measured_networks, slow_networks
from geojax.topology import Process, Topology


def one_process(devices=8):
    return (Process(0, None, "here", devices, "cpu"),)


def test_bus_bandwidth_is_that_of_nccl_tests():
    # 8 ranks, 1 GB in 10 ms: algorithm bandwidth 100 GB/s, times 2 (n-1)/n or (n-1)/n.
    assert bus_bandwidth("all-reduce", 10**9, 8, 0.01) == pytest.approx(175e9)
    assert bus_bandwidth("reduce-scatter", 10**9, 8, 0.01) == pytest.approx(87.5e9)
    assert bus_bandwidth("all-gather", 10**9, 8, 0.01) == pytest.approx(87.5e9)


def test_every_network_of_every_site_is_measured():
    context = ProbeContext.of(one_process(), None, simulated_sites=2)
    assert [(site.name, site.accelerators) for site in context.topology.sites] == [
        ("east", 4),
        ("west", 4),
    ]
    assert context.mesh.shape["dc"] == 2
    assert context.mesh.shape["tensor"] == 4
    assert [site for site, _ in context.own_devices] == ["east"] * 4 + ["west"] * 4
    assert context.first_processes == {}
    assert context.turn() == (0, 1)
    collectives, networks = measured_networks(context, sizes=[4096, 8192])
    assert {(each.site, each.scope, each.collective, each.devices) for each in collectives} == {
        (site, "inside host", collective, 4)
        for site in ("east", "west")
        for collective in ("all-reduce", "reduce-scatter", "all-gather")
    }
    for each in collectives:
        assert list(each.bus_bytes_per_second) == [4096, 8192]
        assert min(each.bus_bytes_per_second.values()) > 0
    assert {each.site for each in networks} == {"east", "west"}
    assert all(0 < each.round_trip_seconds < 1 for each in networks)


def test_a_device_alone_has_no_network(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    assert measured_networks(ProbeContext.of(one_process(1), None, 1)) == ([], [])


def test_devices_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="8 devices do not divide into 3 sites: simulate 9 devices"):
        ProbeContext.of(one_process(), None, simulated_sites=3)


def test_sites_are_called_as_they_are_described():
    described = Topology.load("two-h100-sites")
    context = ProbeContext.of(one_process(), described, simulated_sites=2)
    assert context.topology.site_names == described.site_names
    assert context.topology.links == described.links


def test_a_site_far_behind_the_others_is_named():
    def figures(site, collective, rate):
        return CollectiveFigures(
            site=site,
            scope="between hosts",
            collective=collective,
            devices=4,
            bus_bytes_per_second={1024: 1.0, 2**20: rate},
        )

    names = ("all-gather", "all-reduce")
    alike = [figures(site, name, 1e9) for site in ("east", "west", "north") for name in names]
    assert slow_networks(alike) == set()
    slow = [*alike[:-1], figures("north", "all-reduce", 2e8)]
    assert slow_networks(slow) == {("north", "between hosts", "all-reduce")}
