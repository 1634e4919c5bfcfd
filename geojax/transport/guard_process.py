"""The guard of this process's ports, started, told about peers, and watched."""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from geojax.errors import RunError, UserError
from geojax.transport import guard


class GuardProcess:
    """A running guard; see `geojax.transport.guard`.

    Args:
        key: key of the run.
        address: address and port that peers reach; port 0 for any.
        engine: loopback address of this process.
        ports: its ports that peers may reach.
        seconds: time to wait for the guard of a peer, at the start and when it is silent.

    Raises:
        UserError: the guard cannot listen at `address`.
    """

    def __init__(
        self, key: bytes, address: tuple[str, int], engine: str, ports: list[int], seconds: float
    ):
        self.ended = threading.Event()
        """Set when the guard has ended, by itself or by `close`."""
        self._closed = False
        self._heard: dict[str, Callable[[], None]] = {}
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for this process, which ends the guard. In a session of its own the guard
            # would be scheduled as a group of its own (autogroup), and wait for computation.
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, name="geojax guard", daemon=True)
        self._reader.start()
        facts = {"address": address, "engine": engine, "ports": ports, "seconds": seconds}
        answer = self._tell({"key": key.hex(), **facts})
        if "error" in answer:
            self.close()
            host, port = address
            if port:
                raise UserError(
                    f"transport: cannot listen at {host}, port {port} ({answer['error']}). Give "
                    "the address of this host's tunnel to the other sites, and set "
                    "GEOJAX_ISLANDS_PORT to the first of several free ports"
                )
            raise UserError(
                f"transport: cannot listen at {host} ({answer['error']}); give the address of "
                "this host's tunnel to the other sites"
            )
        self.address: tuple[str, int] = (address[0], answer["port"])
        """Address and port that peers reach."""

    def forward(
        self,
        address: tuple[str, int],
        engine: str,
        ports: Sequence[int],
        heard: Callable[[], None],
    ) -> None:
        """Lead connections to the loopback address of a peer through the peer's guard.

        Args:
            address: the peer's guard.
            engine: loopback address of the peer.
            ports: its ports.
            heard: is called at most once a second while bytes come from there.
        """
        self._heard[engine] = heard
        answer = self._tell({"guard": address, "engine": engine, "ports": ports})
        if "error" in answer:
            raise RunError(
                f"transport: cannot listen at {engine} for a peer ({answer['error']}); start again"
            )

    @property
    def failure(self) -> str | None:
        """Reason why the guard ended by itself; None: it did not."""
        if self._closed or not self.ended.is_set():
            return None
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
        return f"the guard of this process, {self._process.pid}, has ended ({how})"

    def close(self) -> None:
        """End the guard, and with it all connections to other hosts."""
        self._closed = True
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "a pipe"
            with contextlib.suppress(OSError):  # what it was not told any more
                pipe.close()

    def _tell(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "a pipe"
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        return self._answers.get()

    def _read(self) -> None:
        assert self._process.stdout is not None, "a pipe"
        for line in self._process.stdout:
            message = json.loads(line)
            if "heard" not in message:
                self._answers.put(message)
                continue
            for engine in message["heard"]:
                self._heard[engine]()
        self.ended.set()
        self._answers.put({"error": "it has ended"})
