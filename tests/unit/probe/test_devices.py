from geojax.probe.context import ProbeContext
from geojax.probe.devices import Work, measured_devices, slow_devices
from geojax.probe.figures import DeviceFigures, Figures
from geojax.probe.run import flagged
from geojax.topology import Process


def figures(device, flops=1e12, moved=1e12, kind="gpu", host="n1", verdict="ok"):
    return DeviceFigures(
        site="east",
        host=host,
        process=device // 4,
        device=device,
        kind=kind,
        flops_per_second=flops,
        bytes_per_second=moved,
        verdict=verdict,
    )


def test_every_device_is_measured():
    context = ProbeContext.of((Process(0, None, "here", 8, "cpu"),), None, simulated_sites=2)
    work = Work(matrix=128, products=2, vector_bytes=2**16, sweeps=2)
    assert work.operations == 2 * 2 * 128**3
    assert work.bytes_moved == 2 * 2 * 2**16
    found = measured_devices(context, "float32", work)
    assert [each.device for each in found] == list(range(8))
    assert [each.site for each in found] == ["east"] * 4 + ["west"] * 4
    assert all(each.flops_per_second > 0 and each.bytes_per_second > 0 for each in found)


def test_a_device_is_compared_with_its_kind():
    alike = [figures(device) for device in range(6)]
    assert slow_devices(alike) == set()
    assert slow_devices([*alike, figures(6, flops=7e11), figures(7, moved=5e11)]) == {6, 7}
    others = [figures(device, flops=1e11, kind="old gpu") for device in (6, 7)]
    assert slow_devices([*alike, *others]) == set()


def test_a_host_with_slow_devices_alone_is_said_as_one():
    hosts = [figures(n, host=f"n{n // 2}", verdict="slow" if n < 3 else "ok") for n in range(4)]
    assert flagged(Figures(processes=1, dtype="bfloat16", devices=tuple(hosts))) == [
        "host n0 (site east) is slow: all of its 2 devices",
        "device 2 (site east, host n1, process 0) is slow",
    ]
