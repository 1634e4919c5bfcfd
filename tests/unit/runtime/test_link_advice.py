import pytest

from geojax.runtime.advice import link_advice as module
from geojax.runtime.advice.link_advice import TcpSettings, advice_of_process, link_advice
from geojax.runtime.advice.nccl_advice import nccl_advice
from geojax.topology import Link, Process, Topology

LINK = Link(round_trip_seconds=0.021, bytes_per_second=100e9 / 8)
DEFAULTS = TcpSettings(
    tcp_rmem=(4096, 131072, 6291456),
    tcp_wmem=(4096, 16384, 4194304),
    rmem_max=212992,
    wmem_max=212992,
    congestion_control="cubic",
    slow_start_after_idle=True,
)
GENEROUS = TcpSettings(
    (4096, 131072, 2**30), (4096, 16384, 2**30), 2**30, 2**30, "bbr", slow_start_after_idle=False
)


def test_the_defaults_of_linux_on_a_long_fat_link():
    advice = link_advice("link a-b", LINK, 1, DEFAULTS, {})
    assert advice[0] == "link a-b: 100 Gbit/s x 21 ms keep 262 MB in flight"
    # 4 MB of which half is payload, every 21 ms; and twice 262.5 MB, in whole MiB.
    wanted = 501 * 2**20
    assert "2.1 MB of a stream in flight, so at most 799 Mbit/s" in advice[1]
    assert f"net.ipv4.tcp_rmem='4096 131072 {wanted}'" in advice[1]
    assert f"net.ipv4.tcp_wmem='4096 16384 {wanted}'" in advice[1]
    parts = ["NCCL_NSOCKS_PERTHREAD=4", f"net.core.rmem_max={wanted}", "slow_start", "=bbr"]
    for line, part in zip(advice[2:], parts, strict=True):
        assert part in line


def test_what_suffices_is_not_mentioned():
    assert link_advice("link", LINK, 16, GENEROUS, {}) == []
    near = Link(round_trip_seconds=1e-4, bytes_per_second=100e9 / 8)
    assert link_advice("link", near, 4, DEFAULTS, {})[1:] == [
        "  programs that size their buffers themselves get less: sysctl -w "
        "net.core.rmem_max=1048576 net.core.wmem_max=1048576"
    ]


def test_buffers_end_where_the_kernel_does():
    fast = Link(round_trip_seconds=0.1, bytes_per_second=1e12)
    (line,) = (line for line in link_advice("link", fast, 1, DEFAULTS, {}) if "tcp_rmem" in line)
    assert f"'4096 131072 {2**31 - 1}'" in line


def test_settings_are_read_from_proc(tmp_path):
    files = {
        "ipv4/tcp_rmem": "4096\t131072\t6291456",
        "ipv4/tcp_wmem": "4096\t16384\t4194304",
        "ipv4/tcp_congestion_control": "cubic",
        "ipv4/tcp_slow_start_after_idle": "1",
        "core/rmem_max": "212992",
        "core/wmem_max": "212992",
    }
    assert TcpSettings.read(tmp_path) is None
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert TcpSettings.read(tmp_path) == DEFAULTS
    for name in ("core/rmem_max", "core/wmem_max"):  # as in a network namespace
        (tmp_path / name).unlink()
    read = TcpSettings.read(tmp_path)
    assert (read.rmem_max, read.wmem_max) == (6291456, 4194304)


@pytest.mark.parametrize(("hosts", "speaking"), [("wxyz", [0, 1]), ("wxxz", [0, 1]), ("vvvv", [])])
def test_one_process_of_each_site_speaks_where_there_are_several_hosts(
    monkeypatch, hosts, speaking
):
    monkeypatch.setattr(TcpSettings, "read", classmethod(lambda cls: DEFAULTS))
    topology = Topology.load("two-h100-sites")
    sites = ["east", "west", "east", "west"]
    processes = [
        Process(index, site, host, 4, "cpu")
        for index, (site, host) in enumerate(zip(sites, hosts, strict=True))
    ]
    advice = {own: advice_of_process(topology, processes, own, {}) for own in range(4)}
    assert [own for own, lines in advice.items() if lines] == speaking
    if speaking:
        assert advice[1][0].startswith("link west-east (host x): 3.2 Tbit/s x 21 ms keep 8.4 GB")
        assert advice[1][0].endswith("; 2 streams share them")


def test_nccls_sockets_are_streams():
    assert module.nccl_sockets({"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"}) == 8
    assert module.nccl_sockets({}) == 1


WIDE = Link(round_trip_seconds=0.021, bytes_per_second=3.2e12 / 8)


def test_many_devices_fill_a_link_with_nccls_defaults():
    advice = nccl_advice(WIDE, 1536, 50e9, {})
    assert not any("NCCL_BUFFSIZE" in line for line in advice)


def test_few_devices_need_larger_buffers_and_more_channels():
    advice = nccl_advice(WIDE, 8, 50e9, {})
    assert advice[0] == (
        "NCCL keeps 2 x 4.19 MB of a device in flight, so at most 3.2 Gbit/s of its 400 Gbit/s: "
        f"NCCL_BUFFSIZE={2**26} NCCL_MIN_CTAS=32 NCCL_NCHANNELS_PER_NET_PEER=32 allow 400 Gbit/s "
        "for 4.29 GB of memory a connection"
    )
    assert "NCCL_IB_QPS_PER_CONNECTION=4" in advice[1]
    assert "NCCL_ALLNET_ENABLE=1" in advice[2]


def test_what_is_set_for_nccl_is_counted_and_not_said_again():
    given = {
        "NCCL_BUFFSIZE": str(2**26),
        "NCCL_MIN_NCHANNELS": "32",
        "NCCL_IB_QPS_PER_CONNECTION": "8",
        "NCCL_ALLNET_ENABLE": "0",
    }
    assert nccl_advice(WIDE, 8, 50e9, given) == []
    assert nccl_advice(WIDE, 8, 50e9, given | {"NCCL_BUFFSIZE": "much"}) != []
    near = Link(round_trip_seconds=1e-4, bytes_per_second=3.2e12 / 8)
    assert nccl_advice(near, 8, 50e9, {}) == []


@pytest.mark.parametrize(("kind", "about_nccl"), [("NVIDIA H100 80GB HBM3", 2), ("cpu", 0)])
def test_nccl_is_spoken_of_where_it_runs(monkeypatch, kind, about_nccl):
    monkeypatch.setattr(TcpSettings, "read", classmethod(lambda cls: GENEROUS))
    topology = Topology.load("two-h100-sites")
    processes = [
        Process(index, site, f"host-{index}", 768, kind)
        for index, site in enumerate(["east", "west"] * 2)
    ]
    lines = advice_of_process(topology, processes, 0, {})
    assert len(
        [line for line in lines if "NCCL_" in line and line.startswith("link east-west")]
    ) == (about_nccl)
