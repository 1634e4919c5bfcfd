"""A batch crosses few files of geojax, from the data to the update of the state."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "core_files.py"
MOST_FILES = {"zero-3-overlap": 43, "stages-in-sites": 48}
"""A quarter fewer than the 58 and the 63 files that a batch crossed at 61f010c."""


@pytest.mark.parametrize("golden", MOST_FILES)
def test_a_batch_crosses_few_files(golden):
    command = [sys.executable, SCRIPT, "--golden", golden, "--most", str(MOST_FILES[golden])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
