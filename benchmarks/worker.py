"""A process that computes one side of a comparison when it is asked to.

It talks by `benchmarks/step_time/protocol.py`, which it imports as `protocol`.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
FOLDERS = (BENCHMARKS.parent, BENCHMARKS, BENCHMARKS / "step_time")
"""Where a worker finds geojax, PyTorch's model and the protocol."""


class Worker:
    """The process, from its start to `close`."""

    def __init__(
        self,
        side: str,
        script: Path,
        argument: str,
        python: str = sys.executable,
        environment: Mapping[str, str] = os.environ,
    ):
        path = os.pathsep.join(filter(None, (*map(str, FOLDERS), os.environ.get("PYTHONPATH"))))
        self.side = side
        self.process = subprocess.Popen(
            [python, str(script), argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**environment, "PYTHONPATH": path},
        )

    def ask(self, request: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": request, **arguments}) + "\n")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.side} worker died; what it said is above")
        return json.loads(line)["answer"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def imports(python: str, package: str) -> bool:
    """Return True if an interpreter can import a package."""
    command = [python, "-c", f"import {package}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
