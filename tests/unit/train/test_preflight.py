"""The comparison of a step's memory with its devices', before anything is compiled."""

import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from geojax.accelerators import accelerator_named
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.planner.resolve import preflight as module
from geojax.planner.resolve.preflight import (
    judge,
    preflight,
    what_would_fit,
)
from geojax.planner.resolve.run_memory import run_memory
from geojax.step.resolved import MemoryVerdict
from geojax.train.agreed_step import show_memory

REPOSITORY = Path(__file__).parents[3]
TOO_LARGE = REPOSITORY / "tests" / "data" / "nemotron4-340b-zbv.yaml"
BUILTIN = "[{name: python, builtin: python-stdlib}]"
"""A source that is there, and is not prepared before the memory is estimated."""
H100 = accelerator_named("h100-sxm")
MANY_ROWS = (
    "--model",
    "tiny",
    "--batch.global_batch_size",
    "256",
    "--batch.sequence_length",
    "256",
)


@functools.cache
def config_of(*overrides):
    return RunConfig.load(REPOSITORY / "configs" / "quickstart.yaml", overrides)


def peak(*overrides):
    return run_memory(config_of(*overrides), None).bytes


def test_the_command_refuses_a_model_that_does_not_fit_with_the_numbers(tmp_path):
    """340 billion parameters on GPUs that this machine does not have."""
    directory = tmp_path / "run"
    command = [sys.executable, "-m", "geojax", "train", str(TOO_LARGE)]
    environment = {"PATH": "", "PYTHONPATH": str(REPOSITORY), "XLA_CLIENT_MEM_FRACTION": "0.5"}
    done = subprocess.run(
        [*command, "--run_directory", str(directory), "--data.sources", BUILTIN],
        env=environment | {"JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    needed = re.search(r"a step needs about ([\d.]+) GB on a device \(", done.stderr)
    assert float(needed[1]) > 40, done.stderr
    assert "40 GB of an h100-sxm's 80 GB are usable; would fit: --" in done.stderr
    ways = re.findall(r"(?:fit:|or) (--.*?) \(([\d.]+) GB\)", done.stderr)
    assert ways
    assert all(float(gigabytes) <= 40 for _, gigabytes in ways)
    assert not directory.exists()


def test_every_way_out_that_is_named_fits():
    """Halfway between all rows at once and row by row, alone or together."""
    rowwise = peak(*MANY_ROWS, "--batch.microbatches", "32")
    usable = (rowwise + peak(*MANY_ROWS)) // 2
    line = what_would_fit(config_of(*MANY_ROWS), None, usable)
    ways = re.findall(r"--\S+ \S+(?: --\S+ \S+)*", line)
    assert line.startswith("would fit: ")
    assert any(way.startswith("--batch.microbatches ") for way in ways)
    for way in ways:
        assert peak(*MANY_ROWS, *way.split()) <= usable, way


def test_few_settings_are_tried_and_the_least_is_named_where_none_fits(monkeypatch):
    config, traced, said = config_of(*MANY_ROWS), [], []

    def estimate(config, changes, accelerator):
        traced.append(changes)
        return 10**12

    monkeypatch.setattr(module, "_peak", estimate)
    line = what_would_fit(config, None, peak(*MANY_ROWS), said.append)
    assert 0 < len(traced) <= module._TRACED
    assert len(said) == len(traced)
    assert all(line.startswith("the step does not fit; trying --") for line in said)
    assert [len(changes) for changes in traced] == sorted(map(len, traced)), "few changes first"
    assert re.fullmatch(r"--.* takes least, about .*B; more devices, or a larger .*", line)
    assert what_would_fit(config, None, 10).endswith("axis, would be needed")


def test_simulated_devices_and_layouts_that_cannot_be_are_left_alone():
    topology = ("--topology", "two-h100-sites")
    for settings in ((), ("--mesh.data", "2")):
        verdict, _ = preflight(config_of(*topology, *settings), jax.devices())
        assert verdict.kind == "unknown"
    mistaken = RunConfig.load(TOO_LARGE, ["--topology", "simulated-3x2"])
    with pytest.raises(UserError, match="dc"):
        preflight(mistaken, jax.devices())


def test_devices_that_run_are_compared_rather_than_those_of_the_topology():
    small = config_of("--topology", "two-h100-sites", "--simulate_devices", "null")
    gpu = dataclasses.make_dataclass("Device", ["device_kind"])("NVIDIA H100 80GB HBM3")
    verdict, _ = preflight(small, [gpu])
    assert verdict.kind == "fits"
    assert "72 GB of an h100-sxm's 80 GB are usable" in verdict.line
    assert (
        judge(small, run_memory(small, None), accelerator_named("simulated"), {}).kind == "unknown"
    )


def test_a_site_with_its_own_runtime_is_compared_with_its_own_devices():
    settings = ("--topology", "two-h100-sites", "--simulate_devices", "null")
    islands = config_of(*settings, "--model", "tiny", "--dc.join", "islands")
    gpu = dataclasses.make_dataclass("Device", ["device_kind"])("NVIDIA H100 80GB HBM3")
    verdict, _ = preflight(islands, [gpu])
    assert verdict.kind == "fits"
    assert "72 GB of an h100-sxm's 80 GB are usable" in verdict.line


@pytest.mark.parametrize("kind", ["fits", "may not fit", "does not fit", "unknown"])
def test_a_run_says_or_refuses_what_the_verdict_is(kind):
    verdict, said = MemoryVerdict(kind=kind, line="the numbers"), []
    if kind == "does not fit":
        with pytest.raises(UserError, match="preflight: the numbers"):
            show_memory(config_of(), verdict, said.append)
        show_memory(config_of("--preflight", "warn"), verdict, said.append)
    else:
        show_memory(config_of(), verdict, said.append)
    wanted = {
        "fits": ["memory: the numbers"],
        "may not fit": ["warning: memory: the numbers"],
        "unknown": [],
    }
    assert said == wanted.get(kind, ["warning: preflight: the numbers"])
