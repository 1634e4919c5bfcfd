"""Three replicas of torchft and its lighthouse, each started again when it has ended."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from chaos_faults import half_cores
from chaos_faults.growing_file import GrowingFile
from chaos_faults.routed_sites import RoutedSites

from kill_sides.progress import Done
from kill_sides.work import SITES

_LIGHTHOUSE_PORT = 29_510
_RESTART_SECONDS = 1.0
"""As the supervisor of geojax's sites waits."""


class TorchftRun:
    """Three replicas, each in its namespace and cgroup; the lighthouse is in those of the first.

    Args:
        folder: of logs and steps.
        python: the interpreter, which has torch and torchft.
        batches: file of token batches.
        network: joins the sites.
        groups: cgroup of each site; None: there are none.
    """

    def __init__(
        self,
        folder: Path,
        python: str,
        batches: Path,
        network: RoutedSites,
        groups: Sequence[Path] | None,
    ):
        self._folder, self._python, self._batches = folder, python, batches
        self._network, self._groups = network, groups
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._files = [GrowingFile(self._steps(site)) for site in range(len(SITES))]

    def start(self) -> None:
        """Start all, and keep them running."""
        lighthouse = f"{self._network.addresses[0]}:{_LIGHTHOUSE_PORT}"
        # Time-outs of torchft's own examples.
        options = ["--min_replicas", "1", "--join_timeout_ms", "10000", "--quorum_tick_ms", "100"]
        commands = {"lighthouse": [str(Path(self._python).parent / "torchft_lighthouse")]}
        commands["lighthouse"] += ["--bind", lighthouse, *options]
        for site, name in enumerate(SITES):
            commands[name] = [
                *(self._python, "-m", "kill_sides.torchft_replica", str(site)),
                *(self._network.addresses[site], f"http://{lighthouse}"),
                *(str(self._batches), str(self._steps(site))),
            ]
        for name, command in commands.items():
            site = SITES.index(name) if name in SITES else 0
            arguments = (name, self._words(site) + command)
            self._threads.append(threading.Thread(target=self._keep, args=arguments))
            self._threads[-1].start()

    def end(self) -> None:
        """End all."""
        self._over.set()
        for process in list(self._processes.values()):
            process.kill()
        for thread in self._threads:
            thread.join()

    def kill(self, site: int) -> None:
        """End a site's replica at once."""
        self._processes[SITES[site]].send_signal(signal.SIGKILL)

    def kill_head(self) -> int | None:
        """End the lighthouse; no site falls out."""
        self._processes["lighthouse"].send_signal(signal.SIGKILL)
        return None

    def new_steps(self) -> list[Done]:
        """Return the steps that were written since the last call."""
        return [
            Done(
                line["time"],
                site,
                line["step"],
                line["tokens"],
                line["loss"],
                line["participants"],
            )
            for site, file in enumerate(self._files)
            for line in file.new_lines()[0]
        ]

    def _steps(self, site: int) -> Path:
        return self._folder / f"torchft-{SITES[site]}.jsonl"

    def _words(self, site: int) -> list[str]:
        prefix = self._network.command_prefix(site)
        return (
            prefix
            if self._groups is None
            else [*half_cores.words_into(self._groups[site]), *prefix]
        )

    def _keep(self, name: str, command: Sequence[str]) -> None:
        """Start a command again whenever it ends."""
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        with (self._folder / f"torchft-{name}.log").open("ab") as log:
            while not self._over.is_set():
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                self._processes[name] = process
                if self._over.is_set():
                    process.kill()
                process.wait()
                time.sleep(_RESTART_SECONDS)
