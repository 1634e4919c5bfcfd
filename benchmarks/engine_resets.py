"""Connections of JAX's transfer engine that are reset in mid-pull, and the pulls after them.

    python benchmarks/engine_resets.py

Each round is two new processes: one offers 64 MB again and again, one pulls. In mid-pull the one
that pulls resets its connections, as a router or a killed peer does, connects anew and pulls again.
Where a pull does not end within ten seconds, it is tried once more through a new server, from a new
peer. The round ends there, or after the resets that were asked for.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import jaxlib
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

OUTPUT = Path(__file__).resolve().parent / "results" / "engine_resets.json"
NUMBERS = 16 << 20
PATIENCE_SECONDS = 10.0
STUCK_SECONDS = 45.0
"""Time without a word from a round."""
PULL_SECONDS = 0.02
"""Time from the begin of a pull to the reset."""
STREAMS, PIECE_BYTES, COPIES = 1, 4 << 20, 8
"""Staging of a link of 1 Gbit/s and 21 ms."""


def start_server(address: str) -> Any:
    """Start a transfer server at a loopback address."""
    return transfer.start_transfer_server(
        jax.local_devices()[0].client,
        f"{address}:0",
        [f"{address}:0"] * STREAMS,
        max_num_parallel_copies=COPIES,
        transfer_size=PIECE_BYTES,
    )


def random_loopback() -> str:
    """Return an address in 127.0.0.0/8 that no other process uses, most probably."""
    return ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])


def offer() -> None:
    """Offer an array under each number that comes on standard input."""
    server = start_server(random_loopback())
    array = jnp.arange(NUMBERS, dtype=jnp.float32).block_until_ready()
    print(server.address(), flush=True)
    for line in sys.stdin:
        server.await_pull(int(line), [array])
        print(flush=True)
    os._exit(0)


class Peer:
    """A process that offers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--offer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None, "a pipe"
        self.address = self._process.stdout.readline().strip()
        self._number = 0

    def offered(self) -> int:
        """Let it offer the array; return the number of the offer."""
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._number += 1
        print(self._number, file=self._process.stdin, flush=True)
        self._process.stdout.readline()
        return self._number

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def begin_pull(server: Any, peer: Peer) -> tuple[threading.Event, list[str]]:
    """Let a peer offer, connect and pull; return an event of the end, and a list for the error."""
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    wanted = jax.ShapeDtypeStruct((NUMBERS,), jnp.float32, sharding=sharding)
    over, errors = threading.Event(), list[str]()

    def pull() -> None:
        try:
            (array,) = server.connect(peer.address).pull(peer.offered(), [wanted])
            array.block_until_ready()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
        over.set()

    threading.Thread(target=pull, daemon=True).start()
    return over, errors


def open_files() -> int:
    """Return the number of this process's open files."""
    return len(os.listdir("/proc/self/fd"))


def tell(state: dict[str, Any]) -> None:
    """Say how far the round is; it may be the last word of the process."""
    print(json.dumps(state), flush=True)


def reset_connections() -> int:
    """Reset all connections of this process over TCP; return their number."""
    libc, unspecified, count = ctypes.CDLL(None), (ctypes.c_char * 16)(), 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(entry)))
            with copy:
                copy.getpeername()  # a socket that listens has none
                # Connecting to nowhere is how Linux is asked for a reset.
                count += copy.family == socket.AF_INET and not libc.connect(
                    copy.fileno(), unspecified, 16
                )
    return count


def one_round(resets: int) -> dict[str, Any]:
    """Reset connections in mid-pull so often, or until a pull does not end."""
    server, peer = start_server(random_loopback()), Peer()
    state: dict[str, Any] = {"resets": 0, "cut_in_pull": 0, "failed_after": 0, "ended": None}
    while state["resets"] < resets:
        state["resets"] += 1
        over, errors = begin_pull(server, peer)
        time.sleep(PULL_SECONDS)
        reset_connections()
        if not over.wait(PATIENCE_SECONDS):
            state["ended"] = "the pull that was reset hangs"
            break
        state["cut_in_pull"] += bool(errors)
        over, errors = begin_pull(server, peer)
        if not over.wait(PATIENCE_SECONDS):
            state["ended"] = "the pull after it hangs"
            break
        state["failed_after"] += bool(errors)
        tell(state | {"open_files": open_files()})
    peer.kill()
    if state["ended"] is not None:
        peer, server = Peer(), start_server(random_loopback())
        over, errors = begin_pull(server, peer)
        is_sound = over.wait(PATIENCE_SECONDS) and not errors
        state["through_a_new_server_from_a_new_peer"] = "sound" if is_sound else "hangs or fails"
        peer.kill()
    return state | {"open_files": open_files()}


def watched_round(resets: int) -> dict[str, Any]:
    """Return the figures of a round in a process of its own, which may hang as a whole."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, "--one-round", "--resets", str(resets)],
            stdout=output,
            stderr=errors,
            process_group=0,
        )
        size, changed = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - changed < STUCK_SECONDS:
            time.sleep(0.2)
            if (now := os.fstat(output.fileno()).st_size) != size:
                size, changed = now, time.monotonic()
        code = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its peers
        process.wait()
        output.seek(0)
        errors.seek(0)
        state: dict[str, Any] = json.loads(output.read().splitlines()[-1])
        if code is None:
            state["ended"] = "the whole process hangs"
        elif code:
            state["ended"] = f"the process ends with {code}: {errors.readline().strip()[:200]}"
        return state


def main() -> None:
    """Measure some rounds, print a line for each, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--resets", type=int, default=1000, help="resets in a round")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--offer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offer:
        return offer()
    if options.one_round:
        tell(one_round(options.resets))
        os._exit(0)  # threads still wait in XLA
    rounds = []
    for _ in range(options.rounds):
        rounds.append(watched_round(options.resets))
        print(rounds[-1], flush=True)
    record = json.loads(options.output.read_text()) if options.output.exists() else {}
    record[jaxlib.__version__] = {
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "rounds": rounds,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
