"""Words that the command does not know end in one line that says what to type instead."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import PATIENCE_SECONDS

import geojax
from geojax.cli.main import run
from geojax.exit_codes import FAILURE, UNREAD, USAGE


def refused(capsys, *arguments):
    assert run(list(arguments)) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_the_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"geojax {geojax.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_overview_has_each_subcommand(capsys, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  train          Train the transformer that CONFIG describes." in lines
    assert any(line.startswith("  wan restore    Restore links") for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian", "run.yaml"], "there is no subcommand 'trian'; did you mean 'train'?"),
        (["wan", "statsu"], "there is no subcommand 'wan statsu'; did you mean 'wan status'?"),
        (["data"], "there is no subcommand 'data'; did you mean 'data prepare' or 'data show'?"),
        (["xyzzy"], "there is no subcommand 'xyzzy'; there are: train, watch, "),
        (["wan", "mend"], "geojax wan mend is called geojax wan restore now"),
        (["memory", "run.yaml"], "geojax memory is called geojax plan now"),
        (["compile"], "geojax compile is called geojax plan --compile now"),
        (["settings", "optimizer"], "geojax settings is called geojax train --help [SECTION] now"),
        (["simulate", "--help"], "geojax simulate is called geojax plan --schedules now"),
    ],
)
def test_an_unknown_subcommand_gets_the_nearest(capsys, arguments, expected):
    assert refused(capsys, *arguments).startswith(expected)


@pytest.mark.parametrize(
    "before", [["--steps", "5"], ["--steps=5"], ["--topology", "sites.yaml"], ["--resume"]]
)
def test_settings_may_stand_before_the_config_file(capsys, before):
    assert refused(capsys, "train", *before, "none.yaml") == "none.yaml: no such file"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["plan", "tiny", "--rows", "1", "--rows=2"], "--rows"),
        (["plan", "tiny", "--global-batch", "1", "--global_batch", "2"], "--global_batch"),
        (["plan", "tiny", "--measured", "--no-measured"], "--no-measured"),
        (["wan", "up", "--rtt=1ms", "--rtt=1ms"], "--rtt"),
        (["train", "run.yaml", "--steps=5", "--site", "a", "--site=b"], "--site"),
        (["train", "run.yaml", "--steps=5", "--steps", "6"], "--steps"),
        (["plan", "run.yaml", "--batch.x-y=5", "--batch.x_y=6"], "--batch.x_y"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(capsys, arguments, option):
    assert refused(capsys, *arguments).endswith(f": {option} is given twice; give it once")


def test_a_group_that_would_replace_a_setting_is_refused(capsys):
    assert refused(capsys, "train", "run.yaml", "--batch.microbatches=2", "--batch={}") == (
        "geojax train: --batch would replace --batch.microbatches, which stands before it; give "
        "--batch first"
    )


def test_some_options_may_be_given_several_times(capsys):
    assert "twice" not in refused(capsys, "generate", "none", "--prompt", "a", "--prompt=b")


def test_the_value_of_a_setting_is_no_config_file(capsys):
    assert refused(capsys, "train", "--topology", "sites.yaml") == (
        "geojax train: CONFIG is missing; name the YAML file of a run: geojax train run.yaml"
    )


def test_what_is_missing_is_named_with_its_meaning(capsys):
    assert refused(capsys, "export", "runs/mine") == (
        "geojax export: --output PATH is missing; it would be the folder to make"
    )
    assert refused(capsys, "generate") == (
        "geojax generate: RUN is missing; it would be the directory of the run"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "--help", "x"], " more; geojax train --help lists all"),
        (["train", "CONFIG", "--model.foo=1"], " more; geojax train --help model lists all"),
        (["train", "CONFIG", "--x=1"], " more; geojax train --help lists all"),
        (["train", "CONFIG", f"--{'x' * 5000}=1"], " lists all"),
        (["train", "CONFIG", f"--precision={'x' * 5000}"], ""),
        (["train", "--help", "x" * 5000], " lists all"),
    ],
)
def test_no_refusal_is_longer_than_a_line(capsys, arguments, expected):
    config = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
    line = refused(capsys, *(config if each == "CONFIG" else each for each in arguments))
    assert len(line) < 500
    assert line.endswith(expected)


def test_mistakes_of_a_config_are_a_line_each_and_the_first_twenty_are_shown(capsys):
    config = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
    assert run(["train", config, *(f"--batch.wrong{n}=1" for n in range(22))]) == USAGE
    *lines, last = capsys.readouterr().err.splitlines()
    expected = (f"error: --batch.wrong{n}: unknown key; there are: " for n in range(20))
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))
    assert last == f"error: {config}: has 2 more mistakes; correct these first"


def test_a_section_and_a_key_are_explained(capsys):
    assert run(["train", "--help", "communication.bucket_bytes"]) == 0
    key, *meaning = capsys.readouterr().out.splitlines()
    assert key == "  --communication.bucket_bytes  auto, a number of bytes or null  (auto)"
    assert meaning[0].startswith("      Most bytes of a bucket")
    assert run(["train", "--help", "data"]) == 0
    section, *lines = capsys.readouterr().out.splitlines()
    assert section.startswith("data: ")
    assert "  --data.vocab_size  a whole number  (4096)" in lines
    assert "  --data.sources.name  text  (required)" in lines
    assert refused(capsys, "train", "--help", "optimiser") == (
        "a config has no section or key 'optimiser'; did you mean 'optimizer'?"
    )


def test_a_launched_command_needs_two_dashes(capsys):
    assert refused(capsys, "launch", "--sites", "2", "train", "run.yaml", "--steps", "5") == (
        "geojax launch: 'train' is no option; put -- before the command that is launched: "
        "geojax launch -- train run.yaml --steps 5"
    )


def test_after_an_error_the_process_ends_without_waiting_for_threads_or_objects():
    script = """
import atexit, sys, threading, time
from geojax.cli import main

class Slow:
    def __del__(self):
        print("collected")

def waits_for_ever():
    print("said before", end="")
    threading.Thread(target=time.sleep, args=(1e6,)).start()
    return main._end(["error: no"], 2)

atexit.register(print, ", and at the end")
slow = Slow()
main.run = lambda arguments: waits_for_ever()
main.main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (ended.returncode, ended.stderr) == (2, "error: no\n")
    assert ended.stdout == "said before, and at the end\n"


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("JAX_ENABLE_X64", "maybe", "invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'"),
        ("JAX_TRANSFER_GUARD", "x", 'Invalid value "x" for JAX flag jax_transfer_guard'),
    ],
)
def test_variables_that_jax_cannot_read_are_refused_in_one_line(variable, value, problem):
    ended = subprocess.run(
        [sys.executable, "-m", "geojax", "config", "schema"],
        env=os.environ | {variable: value, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == USAGE
    (line,) = ended.stderr.splitlines()
    assert line == f"error: JAX's variables: {problem}; correct it, or unset the variable"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--process-count", "0"], "process_count: input should be greater than or equal to 1"),
        (["--process-id", "3"], "this is process 3 of a job, but of how many processes is not"),
        (["--site", ""], "site: '' is no name of a site"),
        (["--site", "nowhere", "--topology", "simulated-2x4"], "has no site 'nowhere'; its sites"),
        (["--topology", '""'], "no topology preset is called ''"),
        (["--coordinator", "localhost:0"], "its port is no number from 1 to 65535"),
    ],
)
def test_a_place_in_a_job_that_cannot_be_is_refused_before_devices_are(
    capsys, monkeypatch, tmp_path, arguments, problem
):
    monkeypatch.setattr("geojax.runtime.start", lambda _: pytest.fail("devices are slow"))
    config = "configs/quickstart.yaml"
    folder = ["--run_directory", str(tmp_path / "run")]
    assert problem in refused(capsys, "train", config, *folder, *arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "data"])
def test_a_full_disk_is_no_mistake_of_the_user(capsys, monkeypatch, tmp_path, command):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    text = tmp_path / "a.txt"
    text.write_text("one two three " * 100)
    arguments = {
        "train": ["train", "configs/quickstart.yaml", "--run_directory", str(tmp_path / "run")],
        "data": ["data", "prepare", str(text), "--output", str(tmp_path / "out")],
    }[command]
    monkeypatch.setattr("geojax.train.run._train", full)
    monkeypatch.setattr(Path, "mkdir", full)
    assert run(arguments) == FAILURE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "No space left on device" in line


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["config", "schema"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(arguments):
    script = f"import sys; sys.path[:] = {sys.path!r}; from geojax.cli.main import main; main()"
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_SECONDS,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (UNREAD, b"")
