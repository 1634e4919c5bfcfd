"""The directory of a training run, and the lock that keeps a second run out."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from geojax import run_paths
from geojax.checkpoint.lock import FolderLock
from geojax.errors import UserError
from geojax.paths import write_atomically
from geojax.yaml_syntax import Dumper


class RunDirectory:
    """Paths of a run below `path`, which is made if needed.

    config.yaml and step.yaml (the resolved config and step), checkpoints/, metrics.jsonl,
    tensorboard/, trackers/, profile/, loss.png, sample.txt and lock.

    A run that writes holds the lock: `with RunDirectory(path).lock(): ...`. In a run of several
    processes process 0 alone takes it, and alone writes these files, in its own site. The other
    sites' directories hold their checkpoints, each with a lock of its own.

    Raises:
        UserError: `path` cannot be made.
    """

    def __init__(self, path: Path, checkpoints: Path | None = None) -> None:
        """Make the directory; `checkpoints` is the folder of those that lie elsewhere."""
        self.path = Path(path)
        self._make()
        self.config = self.path / run_paths.CONFIG
        self.step = self.step_file(self.path)
        self.checkpoints = checkpoints or self.path / run_paths.CHECKPOINTS
        self.metrics = self.path / run_paths.METRICS
        self.tensorboard = self.path / run_paths.TENSORBOARD
        self.trackers = self.path / run_paths.TRACKERS
        self.profile = self.path / run_paths.PROFILE
        self.loss_curve = self.path / run_paths.LOSS_CURVE
        self.samples = self.path / run_paths.SAMPLES
        self._lock = FolderLock(self.path / run_paths.LOCK)

    def metrics_of(self, process: int) -> Path:
        """Return the file of a process's metrics, by its index in the run."""
        name = f"{self.metrics.stem}.process-{process}{self.metrics.suffix}"
        return self.metrics.with_name(name) if process else self.metrics

    @staticmethod
    def step_file(path: Path) -> Path:
        """Return the file of the resolved step in a run directory, which need not be there."""
        return path / run_paths.STEP

    @staticmethod
    def is_there(path: Path) -> bool:
        """Return True if something is at `path`.

        Raises:
            UserError: a folder on the way to it may not be entered.
        """
        try:
            return path.exists()
        except OSError as error:
            raise UserError(
                f"{path}: cannot be a run directory ({error.strerror}); name a folder that this "
                "user may enter"
            ) from None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved `config` (plain YAML values) as config.yaml, atomically."""
        content = yaml.dump(dict(config), None, Dumper, sort_keys=False, allow_unicode=True)
        write_atomically(self.config, content)

    def lock(self) -> "RunDirectory":
        """Take the lock, which the kernel releases when this process ends in any way.

        Raises:
            UserError: a live process holds it; the message names the process and its host. Or the
                directory holds something else where a run keeps its files.
        """
        try:
            self._refuse_other_artefacts()
        except OSError as error:
            raise UserError(
                f"{error.filename or self.path}: cannot be looked at ({error.strerror}); a run "
                "needs a directory in which it may read and write"
            ) from None
        self._lock.take()
        return self

    def make_again_if_removed(self) -> bool:
        """Make and lock the directory anew if it was removed since it was locked.

        Returns:
            True if it had been removed.

        Raises:
            UserError: it cannot be made, or another run has taken its place.
        """
        if self._lock.is_in_place:
            return False
        self.release()
        self._make()
        self.lock()
        return True

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        self._lock.release()

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"{self.path}: cannot be a run directory ({reason})") from None

    def _refuse_other_artefacts(self) -> None:
        """Check that what stands at the run's paths is what a run writes there."""
        files = (self.config, self.step, self.metrics, self.loss_curve, self.samples)
        for path in files:
            if path.exists() and not path.is_file():
                kind = "a folder" if path.is_dir() else "no regular file"
                raise UserError(f"{path}: is {kind}, but a run keeps a file there; move it away")
            if path.exists() and not os.access(path, os.W_OK):
                raise UserError(f"{path}: is read-only, but a run writes it; move it away")
        for path in (self.checkpoints, self.tensorboard, self.trackers):
            if path.exists() and not path.is_dir():
                raise UserError(f"{path}: is no folder, but a run keeps one there; move it away")

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
