from pathlib import Path

import pytest
from support.topologies import topology_of

from geojax.errors import UserError
from geojax.topology import Process, Topology

PRESETS = sorted(
    path.stem for path in (Path(__file__).parents[2] / "configs/topology").glob("*.yaml")
)

SITE = "{name: %s, hosts: 1, accelerators_per_host: 8, accelerator: h100-sxm}"
LINK = "{sites: [%s, %s], round_trip_seconds: 1ms, bytes_per_second: 1GB/s}"


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def site(name, processes=""):
    return SITE % name if not processes else f"{(SITE % name)[:-1]}, processes: [{processes}]}}"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_links_all_its_sites_and_survives_writing(name):
    topology = Topology.load(name)
    assert topology.name == name
    for source in topology.site_names:
        for target in topology.site_names:
            if source != target:
                assert topology.link(source, target).bytes_per_second > 0
    assert Topology.model_validate(topology.model_dump(mode="json")) == topology


def test_the_two_h100_sites_are_those_of_the_published_run():
    topology = Topology.load("two-h100-sites")
    assert [site.accelerators for site in topology.sites] == [1536, 1536]
    assert topology.link("east", "west").round_trip_seconds == 0.021
    assert topology.sites[0].accelerator.peak("bfloat16") == 989e12


def test_a_path_is_read_and_names_the_topology(tmp_path):
    path = write(
        tmp_path,
        "sites: [{name: a, hosts: 1, accelerators_per_host: 2, accelerator: {name: mine, "
        "memory_bytes: 1GiB, peak_flops_per_second: {bfloat16: 1TFLOP/s}}}]",
    )
    for given in (path, str(path)):
        topology = Topology.load(given)
        assert topology.name == "mine"
        assert topology.sites[0].accelerator.memory_bytes == 2**30
        assert topology.sites[0].accelerator.peak("bfloat16") == 1e12


def test_a_link_may_be_slower_backwards():
    link = {
        "sites": ["a", "b"],
        "round_trip_seconds": 0.02,
        "bytes_per_second": "10Gbit/s",
        "reverse_bytes_per_second": "1Gbit/s",
    }
    topology = topology_of(("a", 1, 8), ("b", 1, 8), links=[link])
    assert topology.link("a", "b").bytes_per_second == 1.25e9
    assert topology.link("b", "a").bytes_per_second == 1.25e8
    assert topology.links_of("a") == {"b": topology.link("a", "b")}
    assert topology.links_of("b") == {"a": topology.link("b", "a")}
    assert topology.links_of("c") == {}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sites: []", "at least 1"),
        (f"sites: [{site('a')}, {site('a')}]", "two sites have the same name"),
        (f"sites: [{site('a')}]\nlinks: [{LINK % ('a', 'z')}]", "names the site 'z'"),
        (f"sites: [{site('a')}]\nlinks: [{LINK % ('a', 'a')}]", "with itself"),
        (
            f"sites: [{site('a')}, {site('b')}]\nlinks: [{LINK % ('a', 'b')}, {LINK % ('b', 'a')}]",
            "two links between",
        ),
        ("sites: [{name: a, hosts: 0}]", r"sites\.0\.hosts"),
        (f"sites: [{(SITE % 'a')[:-1]}, process: [0]}}]", "did you mean 'processes'"),
        (f"sites: [{SITE.replace('sxm', 'sxn') % 'a'}]", "did you mean 'h100-sxm'"),
        (f"sites: [{site('a', '0')}, {site('b')}]", "and others do not"),
        (f"sites: [{site('a', '0')}, {site('b', '0')}]", "lies in two sites"),
    ],
)
def test_mistakes_in_a_file_are_a_line_each_with_the_path(tmp_path, text, part):
    with pytest.raises(UserError, match=part) as caught:
        Topology.load(write(tmp_path, text))
    assert str(caught.value).startswith(str(tmp_path))
    assert all(line.startswith(f"{tmp_path}/mine.yaml") for line in caught.value.lines)


def test_unknown_names_are_refused_with_those_that_exist():
    with pytest.raises(UserError, match="did you mean 'simulated-2x4'"):
        Topology.load("simulated-2x5")
    topology = topology_of(("a", 1, 8), ("b", 1, 8))
    with pytest.raises(UserError, match="its sites are a, b"):
        topology.site("c")
    with pytest.raises(UserError, match="nothing of the link between 'a' and 'b'"):
        topology.link("a", "b")


def process(index, site, host, devices=4, kind="NVIDIA H200"):
    return Process(index, site, host, devices, kind)


def test_running_processes_make_up_sites_host_by_host():
    topology = Topology.from_processes(
        [
            process(3, "b", "b2"),
            process(0, "b", "b1"),
            process(1, "a", "a1"),
            process(2, "b", "b1"),
            process(7, "a", "a1"),
            process(5, "b", "b2"),
        ]
    )
    assert topology.site_names == ("b", "a")  # in the order of their first process
    b, a = topology.sites
    assert (b.processes, a.processes) == ((0, 2, 3, 5), (1, 7))
    assert (b.hosts, b.accelerators_per_host, a.hosts) == (2, 8, 1)
    assert b.accelerator.name == "h200-sxm"


def test_a_kind_that_the_catalogue_lacks_keeps_its_name():
    topology = Topology.from_processes([process(0, None, "h", kind="abacus")])
    assert topology.sites[0].accelerator.name == "abacus"
    assert topology.sites[0].accelerator.memory_bytes is None


def test_a_topology_file_describes_what_runs():
    described = topology_of(("a", 192, 8), ("b", 192, 8))
    running = [process(0, "b", "b1", 8), process(1, "a", "a1", 8), process(2, "b", "b2", 8)]
    topology = Topology.from_processes(running, described_by=described)
    assert topology.site_names == ("a", "b")  # the file's order
    assert [site.hosts for site in topology.sites] == [1, 2]
    assert [site.processes for site in topology.sites] == [(1,), (0, 2)]


@pytest.mark.parametrize(
    ("running", "part"),
    [
        ([process(0, "a", "h", 8), process(1, "c", "h", 8)], "no site 'c'"),
        ([process(0, "a", "h", 8)], "no process runs in site 'b'"),
        ([process(0, "a", "h", 8), process(1, "b", "h", 6)], "not a multiple"),
    ],
)
def test_processes_that_do_not_fit_the_file_are_refused(running, part):
    with pytest.raises(UserError, match=part):
        Topology.from_processes(running, described_by=topology_of(("a", 1, 8), ("b", 1, 8)))


def test_hosts_of_a_site_must_be_of_one_size():
    with pytest.raises(UserError, match="drive 4 and 8 devices"):
        Topology.from_processes([process(0, "a", "h1", 8), process(1, "a", "h2", 4)])


def test_processes_fill_the_sites_in_order():
    topology = topology_of(("a", 1, 8), ("b", 2, 8)).fill({9: 8, 4: 4, 5: 4, 12: 8})
    assert [site.processes for site in topology.sites] == [(4, 5), (9, 12)]


def test_a_process_across_two_sites_or_a_wrong_number_of_devices_is_refused():
    topology = topology_of(("a", 1, 8), ("b", 1, 8))
    with pytest.raises(UserError, match="process 1 would lie in two sites"):
        topology.fill({0: 4, 1: 8, 2: 4})
    with pytest.raises(UserError, match="has 16 accelerators, but there are 8 devices"):
        topology.fill({0: 8})
