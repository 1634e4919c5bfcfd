"""The time that a quota of a cgroup costs is read from cgroups of both versions."""

from geojax.runtime.throttling import throttled_seconds


def read(tmp_path, cgroups, files):
    (tmp_path / "cgroup").write_text(cgroups)
    for name, content in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return throttled_seconds(tmp_path / "cgroup", tmp_path / "mounted")


def test_version_1_counts_nanoseconds(tmp_path):
    stat = "nr_periods 3\nnr_throttled 2\nthrottled_time 2500000000\n"
    assert read(tmp_path, "5:memory:/a\n1:cpu:/b\n0::/\n", {"cpu/b/cpu.stat": stat}) == 2.5


def test_version_2_counts_microseconds_and_a_container_sees_its_root(tmp_path):
    stat = "usage_usec 1\nthrottled_usec 1500000\n"
    assert read(tmp_path, "0::/pods/a\n", {"cpu.stat": stat}) == 1.5


def test_without_counters_it_is_no_time(tmp_path):
    assert read(tmp_path, "0::/\n", {"cpu.stat": "usage_usec 1\n"}) == 0.0
    assert throttled_seconds(tmp_path / "none", tmp_path) == 0.0
