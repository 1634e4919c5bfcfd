"""The options of `geojax evaluate` are checked before a run is opened, and results are not lost."""

import os

import pytest

from geojax.cli.evaluate import _write
from geojax.cli.main import run as geojax
from geojax.errors import RunError


@pytest.fixture
def error_of(capsys):
    """The one line that `geojax evaluate` of no run ends with, for bad input."""

    def run(*options):
        assert geojax(["evaluate", "/nowhere/run", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


@pytest.mark.parametrize("output", ["/proc/x", ".", "/", "", "/nowhere/results.json"])
def test_a_file_that_cannot_be_written(error_of, output):
    assert "cannot be written" in error_of("--output", output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "x", "--task-folder", "/dev/null"), "--task-folder: /dev/null is no folder"),
        (("--tasks", "x", "--num-fewshot", "-1"), "--num-fewshot is -1; at least 0"),
        (("--tasks", "x", "--limit", "0"), "--limit is 0; at least 1"),
        (("--sequences", "0"), "--sequences is 0; at least 1"),
        (("--num-fewshot", "2"), "--num-fewshot requires --tasks"),
    ],
)
def test_options_that_cannot_be(error_of, options, message):
    assert message in error_of(*options)


def test_the_check_leaves_the_file_as_it_is(error_of, tmp_path):
    output = tmp_path / "results.json"
    error_of("--output", str(output))
    assert not output.exists()
    output.write_text("earlier")
    error_of("--output", str(output))
    assert output.read_text() == "earlier"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "cannot be written" in error_of("--output", str(pipe))


def test_results_that_cannot_be_written_are_printed(tmp_path, capsys):
    with pytest.raises(RunError, match=r"could not be written .*the results are above"):
        _write(tmp_path / "gone" / "results.json", '{"step": 3}\n')
    assert capsys.readouterr().out == '{"step": 3}\n'
