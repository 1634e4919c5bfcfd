"""The directory of a training run, and the lock that keeps a second run out."""

import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml

from geojax.errors import UserError


class RunDirectory:
    """Paths of a run below `path`, which is made if needed.

    config.yaml (the resolved config), checkpoints/, metrics.jsonl, tensorboard/, loss.png,
    sample.txt and lock.

    A run that writes holds the lock: `with RunDirectory(path).lock(): ...`. In a run of several
    processes process 0 alone takes it, and alone writes these files; checkpoints are written by
    all.

    Raises:
        UserError: `path` cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._make()
        self.config = self.path / "config.yaml"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.loss_curve = self.path / "loss.png"
        self.samples = self.path / "sample.txt"
        self._lock_path = self.path / "lock"
        self._lock: TextIO | None = None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved `config` (plain YAML values) as config.yaml, atomically."""
        temporary = self.config.with_suffix(".yaml.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            yaml.safe_dump(dict(config), file, sort_keys=False, allow_unicode=True)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.config)

    def lock(self) -> "RunDirectory":
        """Take the lock, which the kernel releases when this process ends in any way.

        Raises:
            UserError: a live process holds it; the message names the process and its host. Or the
                directory holds something else where a run keeps its files.
        """
        assert self._lock is None, "the run directory is locked already"
        self._refuse_other_artefacts()
        try:
            # Opened for appending: the holder's name must not be lost when the lock is refused.
            file = self._lock_path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self._lock_path}: cannot be written ({error.strerror}); a run needs a directory "
                "in which it may write"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"{self.path}: is in use by {holder}; wait for it or use another run directory"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._lock = file
        # The lock belongs to the open file: a forked worker that outlives a killed run would hold
        # it on. Closing the copy in the child leaves the parent's lock alone.
        os.register_at_fork(after_in_child=file.close)
        return self

    def make_again_if_removed(self) -> bool:
        """Make and lock the directory anew if it was removed since it was locked.

        Returns:
            True if it had been removed.

        Raises:
            UserError: it cannot be made, or another run has taken its place.
        """
        assert self._lock is not None, "the run directory must be locked"
        try:
            if os.path.samestat(self._lock_path.stat(), os.fstat(self._lock.fileno())):
                return False
        except FileNotFoundError:
            pass
        self.release()
        self._make()
        self.lock()
        return True

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"{self.path}: cannot be a run directory ({reason})") from None

    def _refuse_other_artefacts(self) -> None:
        """Check that what stands at the run's paths is what a run writes there."""
        files = (self._lock_path, self.config, self.metrics, self.loss_curve, self.samples)
        for path in files:
            if path.exists() and not path.is_file():
                kind = "a folder" if path.is_dir() else "no regular file"
                raise UserError(f"{path}: is {kind}, but a run keeps a file there; move it away")
            if path.exists() and not os.access(path, os.W_OK):
                raise UserError(f"{path}: is read-only, but a run writes it; move it away")
        for path in (self.checkpoints, self.tensorboard):
            if path.exists() and not path.is_dir():
                raise UserError(f"{path}: is no folder, but a run keeps one there; move it away")

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
