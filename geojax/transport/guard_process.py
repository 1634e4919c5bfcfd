"""The guard of this process's ports, started and told about peers."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from geojax.errors import RunError, UserError
from geojax.transport import guard


class GuardProcess:
    """A running guard; see `geojax.transport.guard`.

    Args:
        key: key of the run.
        address: address that peers reach.
        engine: loopback address of this process.
        ports: its ports that peers may reach.
        seconds: time to wait for the guard of a peer, at the start and when it is silent.

    Raises:
        UserError: the guard cannot listen at `address`.
    """

    def __init__(self, key: bytes, address: str, engine: str, ports: list[int], seconds: float):
        self._process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for this process, which ends the guard. In a session of its own the guard
            # would be scheduled as a group of its own (autogroup), and wait for computation.
            process_group=0,
        )
        facts = {"address": [address, 0], "engine": engine, "ports": ports, "seconds": seconds}
        answer = self._tell({"key": key.hex(), **facts})
        if "error" in answer:
            raise UserError(
                f"transport: cannot listen at {address} ({answer['error']}); give the address of "
                "this host's tunnel to the other sites"
            )
        self.address: tuple[str, int] = (address, answer["port"])
        """Address and port that peers reach."""

    def forward(self, address: tuple[str, int], engine: str, ports: Sequence[int]) -> None:
        """Lead connections to the loopback address of a peer through the peer's guard."""
        answer = self._tell({"guard": address, "engine": engine, "ports": ports})
        if "error" in answer:
            raise RunError(
                f"transport: cannot listen at {engine} for a peer ({answer['error']}); start again"
            )

    def close(self) -> None:
        """End the guard, and with it all connections to other hosts."""
        self._process.kill()
        self._process.communicate()

    def _tell(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "it has ended"}
