"""Variables that cannot be meant are refused before anything reads them."""

import os
import subprocess
import sys

import pytest

from geojax.errors import UserError
from geojax.job.cluster_env import VARIABLES
from geojax.runtime.variables import check_environment


@pytest.fixture(autouse=True)
def _as_before_a_backend(monkeypatch):
    monkeypatch.setattr("geojax.runtime.variables.backend_runs", lambda: False)


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("GEOJAX_HEARTBEAT_TIMOUT", "4", "did you mean 'GEOJAX_HEARTBEAT_TIMEOUT'?"),
        ("GEOJAX_COLOR", "1", "there are: GEOJAX_COORDINATOR"),
        ("NPROC", "many", "NPROC=many: is no number of threads"),
        ("NPROC", "100000000", "is no number of threads from 1 to 65536"),
        ("JAX_PLATFORMS", "cpu,,", "'' is none of cpu, gpu"),
        ("JAX_PLATFORMS", "quantum", "'quantum' is none of cpu, gpu"),
        ("XLA_FLAGS", "/no/such/file", "is neither flags, which begin with --, nor a file"),
        ("XLA_FLAGS", "/dev/zero", "is neither flags, which begin with --, nor a file"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=-3", "is no number from 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(variable, value, problem):
    with pytest.raises(UserError) as error:
        check_environment({"PATH": "/bin", variable: value})
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--xla_no_such_flag=1", "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1"),
        ("--xla_gpu_enable_latency_hiding_scheduler=maybe", "interpret value maybe"),
    ],
)
def test_flags_that_xla_dies_of_are_refused(flags, problem):
    """XLA reads its flags once in a process, and this one may have compiled already."""
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = (
        "import os; from geojax.runtime.variables import check_environment; "
        "check_environment(os.environ)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert problem in done.stderr.splitlines()[-1]


def test_what_is_meant_passes():
    given = {
        "NPROC": "64",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true",
    }
    check_environment(given | dict.fromkeys(VARIABLES.values(), "x") | {"XLA_FLAGS_OTHER": "x"})
