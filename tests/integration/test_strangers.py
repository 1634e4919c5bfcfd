"""Real processes start while strangers talk to the rendezvous at every moment."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest
from support.ports import free_port
from support.strangers import KEY, disturb, recorded_lines

PROGRAM = """
from geojax import runtime
processes = runtime.start()
print(len(processes), [process.site for process in processes], flush=True)
runtime.finish()
"""


def start(process, coordinator, key):
    variables = {name: text for name, text in os.environ.items() if not name.startswith("GEOJAX_")}
    variables |= {
        "GEOJAX_COORDINATOR": coordinator,
        "GEOJAX_PROCESS_COUNT": "2",
        "GEOJAX_PROCESS_ID": str(process),
        "GEOJAX_SITE": ["east", "west"][process],
        "GEOJAX_SIMULATE_DEVICES": "1",
        "GEOJAX_START_TIMEOUT_SECONDS": "100",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    } | ({"GEOJAX_KEY": key} if key else {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=variables, **pipes)


@pytest.mark.parametrize("key", [KEY.decode(), None])
def test_one_program_starts_and_says_if_it_has_no_key(key):
    port = free_port()
    recorded = recorded_lines(port)
    processes = [start(0, f"127.0.0.1:{port}", key)]

    def talk():
        with contextlib.suppress(OSError, AssertionError):  # until the rendezvous is over
            while True:
                disturb(port, recorded)

    try:
        if key:
            disturb(port, recorded)
            threading.Thread(target=talk, daemon=True).start()
        processes.append(start(1, f"127.0.0.1:{port}", key))
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
        assert output == "2 ['east', 'west']\n"
    assert ("no key: any program that reaches 127.0.0.1" in outputs[0][1]) == (key is None)
