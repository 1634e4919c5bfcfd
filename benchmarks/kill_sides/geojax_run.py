"""Three sites of geojax that go on without a lost one, each under its supervisor."""

import signal
from collections.abc import Sequence
from pathlib import Path

from chaos_faults.growing_file import GrowingFile
from chaos_faults.routed_sites import RoutedSites
from chaos_faults.supervised_run import SupervisedRun
from support.full_disk import SmallDisk

from geojax.run_paths import METRICS
from kill_sides.progress import Done
from kill_sides.work import SEQUENCE, SITES

_LEASE_SECONDS = 8.0


class GeojaxRun:
    """Three sites, each in its namespace and cgroup.

    Args:
        folder: of logs and run directories.
        config: of the run.
        save_interval: steps from one save to the next.
        network: joins the sites.
        groups: cgroup of each site; None: there are none.
    """

    def __init__(
        self,
        folder: Path,
        config: Path,
        save_interval: int,
        network: RoutedSites,
        groups: Sequence[Path] | None,
    ):
        disks = [SmallDisk(folder / site) for site in SITES]
        for disk in disks:
            disk.folder.mkdir(parents=True, exist_ok=True)
        self._run = SupervisedRun(
            folder, config, disks, network, groups, _LEASE_SECONDS, save_interval
        )
        self._files = [GrowingFile(written / METRICS) for written in self._run.written]

    def start(self) -> None:
        """Start all sites."""
        self._run.start()

    def end(self) -> None:
        """End all."""
        self._run.end()

    def kill(self, site: int) -> None:
        """End a site's process at once."""
        self._run.send(site, signal.SIGKILL)

    def kill_head(self) -> int | None:
        """End the site that holds the record of who takes part; return its number."""
        record = self._run.record()
        assert record is not None, "the sites train"
        self.kill(record.holder)
        return record.holder

    def new_steps(self) -> list[Done]:
        """Return the steps that were written since the last call."""
        record = self._run.record()
        members = 0 if record is None else len(record.members)
        return [
            Done(
                line["time"],
                site,
                line["step"],
                line["global_batch_size"] * SEQUENCE,
                line["loss"],
                members,
            )
            for site, file in enumerate(self._files)
            for line in file.new_lines()[0]
            if "seconds" in line
        ]
