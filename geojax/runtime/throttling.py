"""Time for which the kernel held this process back, because its cgroup had used up its quota."""

import contextlib
from pathlib import Path

_UNITS = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
"""Seconds of the counters of cgroup 2 and cgroup 1."""


def throttled_seconds(
    cgroups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return the seconds since the cgroup began; 0.0 where nothing counts them.

    Args:
        cgroups: the process's cgroups, as Linux lists them.
        mounted: folder in which they are mounted.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in cgroups.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            folder = mounted
            if number != "0":
                if "cpu" not in controllers.split(","):
                    continue
                folder = mounted / controllers
                if not folder.is_dir():
                    folder = mounted / "cpu"
            # In a container its own cgroup is the root of what is mounted.
            for statistics in (folder / path.lstrip("/") / "cpu.stat", folder / "cpu.stat"):
                if statistics.is_file() and (seconds := _counted(statistics)) is not None:
                    return seconds
    return 0.0


def _counted(statistics: Path) -> float | None:
    for line in statistics.read_text().splitlines():
        name, _, count = line.partition(" ")
        if name in _UNITS:
            return int(count) * _UNITS[name]
    return None
