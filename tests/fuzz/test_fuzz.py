"""The fuzz of the command, in a process of its own that no backend of JAX has been started in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_bad_input_ends_in_one_line_at_once_and_leaves_nothing(pytestconfig):
    cases = pytestconfig.getoption("--fuzz-cases")
    path = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GEOJAX_", "SLURM_", "XLA_", "JAX_", "NPROC"))
    }
    result = subprocess.run(
        [sys.executable, "-m", "fuzz", "--cases", str(cases)],
        env=clean | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{cases} cases in" in result.stdout
