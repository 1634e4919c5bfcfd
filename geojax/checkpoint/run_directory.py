"""The directory of a training run, and the lock that keeps a second run out."""

import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml

from geojax.checkpoint.folder import committed_steps
from geojax.errors import UserError


class RunDirectory:
    """Paths of a run below `path`, which is made if needed.

    config.yaml (the resolved config), checkpoints/, metrics.jsonl, tensorboard/ and lock.

    A run that writes holds the lock: `with RunDirectory(path).lock(): ...`. In a run of several
    processes process 0 alone takes it.

    Raises:
        UserError: `path` cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be a run directory ({error.strerror})") from None
        self.config = self.path / "config.yaml"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self._lock_path = self.path / "lock"
        self._lock: TextIO | None = None

    @property
    def has_checkpoint(self) -> bool:
        """True if there is a committed checkpoint to resume from."""
        return bool(committed_steps(self.checkpoints))

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
            UserError: a live process holds it; the message names the process and its host.
        """
        assert self._lock is None, "the run directory is locked already"
        # Opened for appending: the holder's name must not be lost when the lock is refused.
        file = self._lock_path.open("a+", encoding="utf-8")
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

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
