"""An exception of C++ that nobody catches, in a process of its own."""

import signal
import subprocess
import sys

import pytest

from geojax.runtime.liveness import uncaught

# The file alone, without JAX; std::terminate is what C++ calls then.
PROGRAM = """
import ctypes, os, runpy, sys
before_abort = runpy.run_path(sys.argv[1])["before_abort"]
def act():
    print("not quite", flush=True)
    {last_act}
assert before_abort(act)
ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
"""


@pytest.mark.parametrize(
    ("last_act", "code"), [("os._exit(9)", 9), ("return", -signal.SIGABRT)], ids=["ends", "returns"]
)
def test_the_last_act_comes_before_the_abort(last_act, code):
    command = [sys.executable, "-I", "-S", "-c", PROGRAM.format(last_act=last_act)]
    done = subprocess.run(
        [*command, uncaught.__file__], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "not quite\n")
