from geojax.probe import Figures, measured_topology, save_topology
from geojax.probe.figures import CollectiveFigures, DeviceFigures, NetworkFigures, ProbedLink
from geojax.topology import Process, SharedCores, Topology


def device(site, number, flops):
    return DeviceFigures(
        site=site,
        host="n1",
        process=0,
        device=number,
        kind="cpu",
        flops_per_second=flops,
        bytes_per_second=2e10,
    )


def link(source, target, rate):
    return ProbedLink(
        source=source,
        target=target,
        round_trip_seconds=0.0213,
        bytes_per_second={1: rate / 3, 4: rate},
        packet_share=0.965,
    )


CORES = SharedCores(
    devices_per_core=4,
    update_seconds_per_number=3e-8,
    message_seconds=0.022,
    message_bytes_per_second=3e7,
    processor_seconds_per_byte=1.5e-9,
    encode_seconds_per_number={"none": 1e-9, "bf16": 3e-9, "int8": 2.5e-8},
)


def figures(**changes):
    gather = CollectiveFigures(
        site="east",
        scope="inside host",
        collective="all-gather",
        devices=4,
        bus_bytes_per_second={1024: 1e6, 2**20: 3e9},
    )
    network = NetworkFigures(site="east", scope="inside host", round_trip_seconds=4e-6)
    content = {
        "processes": 2,
        "dtype": "float32",
        "devices": (device("east", 0, 1e11), device("east", 1, 3e11), device("west", 2, 5e10)),
        "collectives": (gather,),
        "networks": (network,),
        "links": (link("east", "west", 1.2e8), link("west", "east", 9e7)),
        "shared_cores": CORES,
    }
    return Figures(**(content | changes))


def running(kind="cpu", described_by=None, hosts=1):
    processes = [
        Process(index, site, f"{site}{host}", 4, kind)
        for index, (site, host) in enumerate(
            (site, host) for site in ("east", "west") for host in range(hosts)
        )
    ]
    return Topology.from_processes(processes, described_by)


def test_what_was_measured_is_what_a_topology_file_says(tmp_path):
    path = tmp_path / "measured.yaml"
    measured = measured_topology(running(), figures())
    save_topology(measured, path, ["Measured on two machines.", "Beware."])
    assert path.read_text().startswith("# Measured on two machines.\n# Beware.\nsites:\n")
    read = Topology.load(path)
    assert read.name == "measured"
    east, west = read.sites
    assert (east.hosts, east.accelerators_per_host, east.processes) == (1, 4, ())
    assert east.accelerator.name == "simulated"
    assert east.accelerator.peak("float32") == 2e11
    assert east.accelerator.memory_bytes_per_second == 2e10
    assert west.accelerator.peak("float32") == 5e10
    assert east.inside_host.bytes_per_second == 3e9
    assert east.inside_host.round_trip_seconds == 4e-6
    assert west.inside_host is None
    assert east.shared_cores == west.shared_cores == CORES
    there, back = read.link("east", "west"), read.link("west", "east")
    assert there.round_trip_seconds == back.round_trip_seconds == 0.0213
    assert (there.bytes_per_second, back.bytes_per_second) == (1.2e8, 9e7)


def test_published_peaks_and_links_that_were_not_measured_stay(tmp_path):
    described = Topology.load("two-h100-sites")
    eight = running("NVIDIA H100 80GB HBM3")
    eight = eight.model_copy(update={"links": described.links})
    measured = measured_topology(eight, figures(links=()))
    save_topology(measured, tmp_path / "measured.yaml", [])
    read = Topology.load(tmp_path / "measured.yaml")
    assert [site.accelerator for site in read.sites] == [s.accelerator for s in described.sites]
    assert "accelerator: h100-sxm\n" in (tmp_path / "measured.yaml").read_text()
    assert read.link("east", "west") == described.link("east", "west")


def test_one_pair_of_hosts_does_not_say_what_a_shared_link_carries():
    links = Topology.load("two-h100-sites").links
    shared = running(hosts=2).model_copy(update={"links": links})
    measured = measured_topology(shared, figures()).link("east", "west")
    assert measured.bytes_per_second == links[0].bytes_per_second
    assert measured.round_trip_seconds == 0.0213
