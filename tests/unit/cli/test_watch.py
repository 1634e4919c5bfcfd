"""`geojax watch` follows a run until it ends, without a terminal line by line."""

import json

import pytest
from support.synthetic_runs import write_run

from geojax.cli import watch
from geojax.cli.main import run
from geojax.exit_codes import INTERRUPTED, USAGE
from geojax.saved_runs.records.run_files import LocalFiles


@pytest.fixture
def turns(monkeypatch):
    """Actions that happen while the command sleeps, one each time; then Ctrl-C."""
    actions = []

    def sleep(seconds):
        if not actions:
            raise KeyboardInterrupt
        actions.pop(0)()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    return actions


def lines_of(steps, **more):
    return "".join(json.dumps({"step": step, "loss": step / 2, **more}) + "\n" for step in steps)


def test_a_run_that_has_ended(tmp_path, capsys, turns):
    folder = write_run(tmp_path / "run")
    assert run(["watch", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step 2000/")] == [
        "step 2000/2000"
    ] * 3
    assert "step 2,000 end: done: 2000 steps" in lines
    assert len(lines) == 20


def test_once(tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=300)
    assert run(["watch", str(folder), "--once"]) == 0
    assert "step 300 of 2,000" in capsys.readouterr().out
    assert run(["watch", str(tmp_path / "none"), "--once"]) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path}/none: no run is there yet; name its run_directory"


def test_steps_as_they_come_and_over_a_resume(tmp_path, capsys, turns):
    folder = tmp_path / "run"

    def begin():
        folder.mkdir()
        (folder / "config.yaml").write_text("steps: 4\n")
        (folder / "metrics.jsonl").write_text(lines_of([1, 2], time=1))

    def go_on():
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(lines_of([3], time=1))

    def resume():
        (folder / "metrics.jsonl").write_text(lines_of([1, 2], time=1) + lines_of([3], time=2))

    def end():
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(lines_of([4], time=2))

    turns += [begin, go_on, lambda: None, resume, end]
    assert run(["watch", str(folder)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{folder}: no run is there yet; waiting for it"
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "3/4", "4/4"]


def test_ctrl_c_is_quiet(tmp_path, capsys, turns):
    assert run(["watch", str(tmp_path / "later")]) == INTERRUPTED
    assert capsys.readouterr().err == ""


def test_here_or_on_a_host(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(watch, "RemoteFiles", lambda *arguments: opened.append(arguments))
    watch.open_files("east1:runs/a b")
    watch.open_files("me@east1:~/run")
    assert opened == [("east1", "runs/a b"), ("me@east1", "~/run")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "east1:run").mkdir()
    for path in ("east1:run", "runs/a:b", "/runs/a:b", "run"):
        assert isinstance(watch.open_files(path), LocalFiles)


@pytest.mark.parametrize(
    ("run_name", "expected"),
    [
        ("-oProxyCommand=x:run", "Missing value for argument 'run'"),
        (" a:run", "is no host for ssh"),
        ("east1:", "names no directory"),
        ("", "the path is empty"),
    ],
)
def test_what_names_no_run(capsys, run_name, expected):
    assert run(["watch", run_name, "--once"]) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
