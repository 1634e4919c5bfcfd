import os
import subprocess
import sys

import pytest

from geojax.errors import UserError
from geojax.runtime import apply_xla_flags, enable_compilation_cache, flags_in_force
from geojax.runtime import xla_flags as module
from geojax.runtime.xla_flags import expected_platform, recommended_flags


@pytest.fixture
def before_the_backend(monkeypatch):
    monkeypatch.setattr(module, "backend_runs", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "")
    return monkeypatch


def test_what_the_user_set_stays(before_the_backend):
    mine = "--xla_gpu_all_reduce_combine_threshold_bytes=77 --xla_dump_to=/somewhere"
    before_the_backend.setenv("XLA_FLAGS", mine)
    apply_xla_flags("gpu")
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[:2] == mine.split()
    names = [flag.split("=")[0] for flag in flags]
    assert len(names) == len(set(names))
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags
    apply_xla_flags("gpu")  # a second time adds nothing
    assert os.environ["XLA_FLAGS"].split() == flags


def test_the_line_for_the_log(before_the_backend):
    before_the_backend.setenv("NPROC", "32")
    assert flags_in_force() == "XLA flags: none; NPROC=32"
    before_the_backend.setenv("XLA_FLAGS", "--xla_gpu_a=1 --xla_b=2")
    before_the_backend.delenv("NPROC")
    assert flags_in_force() == "XLA flags: gpu_a=1 b=2"


def test_flags_that_would_be_ignored_are_refused(monkeypatch):
    monkeypatch.setattr(module, "backend_runs", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(UserError, match="before the first JAX operation"):
        apply_xla_flags("cpu")


def test_simulated_devices_mean_a_cpu():
    assert expected_platform() == "cpu"


def test_xla_knows_every_flag():
    """XLA ends the process at an unknown flag, whatever its platform."""
    flags = recommended_flags("cpu") | recommended_flags("gpu")
    result = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.jit(lambda x: x + 1)(1))"],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(f"{k}={v}" for k, v in flags.items())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_compilation_cache_holds_programs_for_the_next_run(tmp_path):
    program = f"""
import pathlib
import jax
from geojax.runtime import enable_compilation_cache
enable_compilation_cache(pathlib.Path({str(tmp_path / "a" / "cache")!r}))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8))).block_until_ready()
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
        files = {path.name for path in (tmp_path / "a" / "cache").iterdir() if "cache" in path.name}
        assert files
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="compilation cache"):
        enable_compilation_cache(tmp_path / "file" / "cache")
