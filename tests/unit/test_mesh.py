"""Where devices stand in the mesh; several processes and ahead-of-time devices are objects that
have what such devices have: id, process_index, platform, device_kind."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.h100 import h100_devices, needs_cuda
from support.topologies import topology_of

from geojax import mesh as mesh_module
from geojax.accelerators import accelerator_of
from geojax.errors import UserError
from geojax.mesh import AXES, index_on_host, leads_site, make_mesh, register_processes
from geojax.topology import Process, Topology


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


def fake_devices(devices_of_process):
    """Devices whose ids leave gaps between processes, as those of several real processes do."""
    return [
        FakeDevice(id=process * 2048 + local, process_index=process)
        for process, count in devices_of_process.items()
        for local in range(count)
    ]


@pytest.fixture
def registered():
    yield register_processes
    mesh_module._registered.clear()


def processes_of(mesh):
    """The process of every device, one row a site."""
    flat = mesh.devices.reshape(mesh.shape["dc"], -1)
    return [[device.process_index for device in site] for site in flat]


def test_processes_of_one_host_are_counted(registered):
    assert index_on_host(0) == 0, "nothing is registered"
    hosts = ["a", "b", "a", "a"]
    registered([Process(index, "east", host, 1, "cpu") for index, host in enumerate(hosts)])
    assert list(map(index_on_host, range(4))) == [0, 0, 1, 2]


def test_all_six_axes_always_exist_and_are_auto():
    mesh = make_mesh(dc=2, data=4)
    assert mesh.axis_names == AXES
    assert AXES == ("dc", "stage", "data", "expert", "context", "tensor")
    assert dict(mesh.shape) == dict(zip(AXES, (2, 1, 4, 1, 1, 1), strict=True))
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("dc", [1, 2, 4, 8])
def test_one_process_is_cut_evenly_into_sites(dc):
    mesh = make_mesh(dc=dc, data=8 // dc)
    assert [device.id for device in mesh.devices.flatten()] == list(range(8))


@pytest.mark.parametrize("sizes", [{"data": 3}, {"dc": 3, "data": 2}, {"stage": 2, "tensor": 3}])
def test_some_of_the_devices(sizes):
    count = int(np.prod(list(sizes.values())))
    mesh = make_mesh(**sizes, devices=jax.devices()[:count])
    assert mesh.devices.size == count


def test_tensor_is_innermost_then_context_expert_data_stage_dc():
    devices = fake_devices({0: 64})
    ids = make_mesh(
        dc=2, stage=2, data=2, expert=2, context=2, tensor=2, devices=devices[::-1]
    ).devices
    for position, stride in enumerate((32, 16, 8, 4, 2, 1)):
        step = [0] * 6
        step[position] = 1
        assert ids[tuple(step)].id - ids[0, 0, 0, 0, 0, 0].id == stride


def test_a_topology_of_simulated_sites():
    mesh = make_mesh(Topology.load("simulated-2x4"), dc=2, data=2, tensor=2)
    assert mesh.shape["dc"] == 2
    with pytest.raises(UserError, match=r"2 site\(s\) \(east, west\): dc must be 2"):
        make_mesh(Topology.load("simulated-2x4"), data=8)


def test_a_few_simulated_devices_stand_in_for_a_large_topology_but_real_ones_do_not():
    large = Topology.load("two-h100-sites")
    assert make_mesh(large, dc=2, data=4).devices.size == 8
    with pytest.raises(UserError, match="3072 accelerators, but there are 8 devices"):
        make_mesh(large, dc=2, data=4, devices=fake_devices({0: 8}))


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"dc": 2, "data": 3}, r"dc=2 x data=3 makes 6 .* there are 8: data=4 would work"),
        ({"dc": 3, "data": 2}, "dc=4 would work; or simulate 6 devices"),
        ({"dc": 3, "data": 3}, "the sizes must multiply to 8"),
        ({}, "data=8 would work"),
        ({"stage": 3, "tensor": 2}, "stage=4 would work"),
        ({"data": 0}, "data=0: a size is at least 1"),
        ({"tensor": -1}, "tensor=-1"),
        ({"dc": 2, "tensor": 8}, "tensor=4 would work"),
    ],
)
def test_sizes_that_do_not_fit_are_answered_with_sizes_that_do(sizes, part):
    with pytest.raises(UserError, match=part) as caught:
        make_mesh(**sizes)
    assert "\n" not in str(caught.value)


def test_too_many_simulated_devices_in_several_processes_name_the_launchers_option(registered):
    """As when each of two processes simulates as many devices as the config asks for in all."""
    registered([Process(i, site, "here", 4, "cpu") for i, site in enumerate("ab")])
    devices = [dataclasses.replace(each, platform="cpu") for each in fake_devices({0: 4, 1: 4})]
    with pytest.raises(UserError, match=r"in all, 2 in each of .* launch --devices-per-process 2"):
        make_mesh(dc=2, data=2, devices=devices)


@pytest.mark.parametrize("sites", [2, 3, 4])
def test_sites_are_made_of_whole_processes_that_said_where_they_run(sites, registered):
    """Processes of the sites interleave, and neither their numbers nor their ids are contiguous."""
    names = "abcd"[:sites]
    where = {index: names[(index // 3) % sites] for index in range(0, 6 * sites, 3)}
    registered([Process(i, site, f"host{i}", 4, "gpu") for i, site in where.items()])
    mesh = make_mesh(dc=sites, data=2, tensor=4, devices=fake_devices(dict.fromkeys(where, 4)))
    for row, name in zip(processes_of(mesh), names, strict=True):
        first, second = (index for index, site in where.items() if site == name)
        assert row == [first] * 4 + [second] * 4
        assert len(set(row)) == 2


def test_processes_of_one_host_stand_side_by_side(registered):
    # A task for each GPU, dealt out cyclically over two hosts, as SLURM may do.
    registered([Process(i, None, f"host{i % 2}", 1, "gpu") for i in range(8)])
    mesh = make_mesh(data=2, tensor=4, devices=fake_devices(dict.fromkeys(range(8), 1)))
    assert processes_of(mesh) == [[0, 2, 4, 6, 1, 3, 5, 7]]


def test_a_tensor_group_does_not_cross_hosts(registered):
    registered([Process(i, "a", f"host{i}", 4, "gpu") for i in range(4)])
    with pytest.raises(UserError, match=r"host of 4 accelerators.* tensor may be 1, 2, 4"):
        make_mesh(data=2, tensor=8, devices=fake_devices(dict.fromkeys(range(4), 4)))
    with pytest.raises(UserError, match="tensor may be 1, 2, 4"):
        make_mesh(tensor=16, devices=fake_devices(dict.fromkeys(range(4), 4)))
    # Six of two hosts' eight devices: the third group of four would lie on both.
    eight = fake_devices({0: 4, 1: 4})
    with pytest.raises(UserError, match="host of 1 accelerators"):
        make_mesh(data=3, tensor=2, devices=eight[:3] + eight[4:7])


def test_dc_must_be_the_number_of_sites(registered):
    registered([Process(i, "ab"[i % 2], "host", 4, "gpu") for i in range(4)])
    devices = fake_devices(dict.fromkeys(range(4), 4))
    with pytest.raises(UserError, match=r"lie in 2 site\(s\) \(a, b\): dc must be 2"):
        make_mesh(data=16, devices=devices)
    with pytest.raises(UserError, match="dc must be 2"):
        make_mesh(dc=4, data=4, devices=devices)
    # One site's devices alone are a machine of one site.
    site_b = [device for device in devices if device.process_index in (1, 3)]
    assert processes_of(make_mesh(data=8, devices=site_b)) == [[1] * 4 + [3] * 4]


def test_a_site_that_does_not_hold_its_share_is_named(registered):
    registered([Process(i, "aab"[i], f"host{i}", 4, "gpu") for i in range(3)])
    with pytest.raises(UserError, match="a 8, b 4"):
        make_mesh(dc=2, data=6, devices=fake_devices(dict.fromkeys(range(3), 4)))


def test_several_processes_need_to_say_where_they_run():
    devices = fake_devices({0: 4, 1: 4})
    with pytest.raises(UserError, match="GEOJAX_SITE"):
        make_mesh(dc=2, data=4, devices=devices)
    assert processes_of(make_mesh(data=8, devices=devices)) == [[0] * 4 + [1] * 4]


def test_a_topology_may_name_the_processes():
    topology = topology_of(("a", 1, 4), ("b", 1, 4))
    sites = [
        site.model_copy(update={"processes": processes})
        for site, processes in zip(topology.sites, [(5,), (2,)], strict=True)
    ]
    topology = topology.model_copy(update={"sites": tuple(sites)})
    mesh = make_mesh(topology, dc=2, data=4, devices=fake_devices({2: 4, 5: 4}))
    assert processes_of(mesh) == [[5] * 4, [2] * 4]
    with pytest.raises(UserError, match="places process 7 in no site"):
        make_mesh(topology, dc=2, data=4, devices=fake_devices({2: 4, 7: 4}))


@pytest.mark.parametrize("per_process", [1, 8])
def test_ahead_of_time_devices_fill_the_topology(per_process):
    """3,072 devices that no process of this machine holds, a process a host or a process a GPU."""
    devices = fake_devices(dict.fromkeys(range(3072 // per_process), per_process))
    mesh = make_mesh(
        Topology.load("two-h100-sites"), dc=2, stage=12, data=16, tensor=8, devices=devices
    )
    first, second = processes_of(mesh)
    assert max(first) + 1 == min(second) == 1536 // per_process
    hosts = np.vectorize(lambda device: device.process_index * per_process // 8)(mesh.devices)
    assert (hosts == hosts[..., :1]).all()  # each tensor group on one host


def test_ahead_of_time_devices_of_another_number_are_refused():
    with pytest.raises(UserError, match="3072 accelerators, but there are 64 devices"):
        make_mesh(
            Topology.load("two-h100-sites"),
            dc=2,
            data=32,
            devices=fake_devices(dict.fromkeys(range(8), 8)),
        )


@needs_cuda
def test_devices_of_a_gpu_topology_compiled_ahead_of_time():
    mesh = make_mesh(
        Topology.load("two-h100-sites"),
        dc=2,
        stage=12,
        data=16,
        tensor=8,
        devices=h100_devices(2, 192),
    )
    first, second = processes_of(mesh)
    assert (max(first), min(second)) == (191, 192)
    assert accelerator_of(mesh.devices.flat[0]).name == "h100-sxm"


def test_one_process_of_each_site_leads_it(monkeypatch):
    """Of two sites with two processes of two devices each, the first process of each."""
    processes = np.array([0, 0, 1, 1, 2, 2, 3, 3]).reshape(2, 1, 4)
    devices = np.array([SimpleNamespace(process_index=each) for each in processes.flat])
    mesh = SimpleNamespace(devices=devices.reshape(processes.shape), shape={"dc": 2})
    leading = []
    for process in range(4):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        leading.append(leads_site(mesh))
    assert leading == [True, False, True, False]
