"""Cgroups with a quota of processor time, one for each site."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_PERIOD = 40_000
"""Microseconds of a period of a quota: a site that has used it up stands still for the rest."""


@contextlib.contextmanager
def quotas(names: Sequence[str], cores: float) -> Iterator[list[Path] | None]:
    """Make cgroups with a quota of so many cores each; None where this machine lets nobody.

    Args:
        names: of the groups.
        cores: processor seconds per second of each.
    """
    is_first_version = (_GROUPS / "cpu").is_dir()
    root = _GROUPS / "cpu" if is_first_version else _GROUPS
    folders: list[Path] = []
    try:
        try:
            for name in names:
                (folder := root / name).mkdir()
                folders.append(folder)
                quota = round(cores * _PERIOD)
                if is_first_version:
                    (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
                    (folder / "cpu.cfs_quota_us").write_text(str(quota))
                else:
                    (folder / "cpu.max").write_text(f"{quota} {_PERIOD}")
        except OSError:
            yield None
        else:
            yield folders
    finally:
        for folder in folders:
            _remove(folder)


def _remove(folder: Path) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)


def words_into(folder: Path) -> list[str]:
    """Return words before a command that runs in a cgroup."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(folder)]
