"""The first line of a run comes before JAX, and once."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import PATIENCE_SECONDS

import geojax
from geojax.cli.train import TrainCommand, announce
from geojax.errors import UserError

CONFIG = """\
run_directory: runs/x
model: tiny
lr: 1
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    return Path("run.yaml")


def test_the_first_line_names_version_config_and_run_directory(capsys, config):
    announce(TrainCommand(config), [])
    assert capsys.readouterr().out == f"geojax {geojax.__version__}: run.yaml -> runs/x\n"
    announce(TrainCommand(config), ["--run_directory=/y"])
    assert capsys.readouterr().out == f"geojax {geojax.__version__}: run.yaml -> /y\n"


def test_only_the_first_process_says_it(capsys, config, monkeypatch):
    place = {"process_count": 2, "coordinator": "localhost:1234"}
    announce(TrainCommand(config, process_id=1, **place), [])
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("GEOJAX_PROCESS_ID", "0")
    announce(TrainCommand(config, **place), [])
    assert capsys.readouterr().out.startswith("geojax ")


def test_a_file_that_is_none_is_refused_at_once(config):
    with pytest.raises(UserError, match=r"^none.yaml: no such file"):
        announce(TrainCommand(Path("none.yaml")), [])


@pytest.mark.parametrize(
    ("verb", "line"), [("train", ": run.yaml -> runs/x"), ("plan", ": plan of run.yaml")]
)
def test_it_is_said_before_jax_is_imported(config, verb, line):
    script = f"""
import sys; sys.path[:] = {sys.path!r}
from geojax.cli import main
main.imported = lambda module: print(module, "jax" in sys.modules) or sys.exit(0)
main.run([{verb!r}, "run.yaml"])
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    first, second = ended.stdout.splitlines()
    assert first.endswith(line)
    assert second == "jax False"
