"""What `geojax launch --restarts` starts again, with small Python programs."""

import sys

import pytest

from geojax.cli.main import run
from geojax.exit_codes import FAILURE, HANG, UNHEALTHY, USAGE

PROGRAM = """
import os, sys
print("hello")
if os.environ["GEOJAX_SITE"] == "west":
    sys.exit({code})
"""


@pytest.fixture
def launched(capsys, monkeypatch):
    """Runs a program whose second process ends with a code; what the launcher said of it."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def launched(code):
        options = ["--sites", "2", "--restarts", "1", "--grace-seconds", "1s"]
        program = [sys.executable, "-S", "-c", PROGRAM.format(code=code)]
        assert run(["launch", *options, "--", *program]) == code
        printed = capsys.readouterr()
        said = [line for line in printed.err.splitlines() if line.startswith("geojax launch: ")]
        return printed.out.count("hello"), [line.partition(": ")[2] for line in said]

    return launched


@pytest.mark.parametrize("code", [0, UNHEALTHY])
def test_what_was_done_is_neither_repeated_nor_started_again(launched, code):
    assert launched(code) == (2, ["2 process(es) in east, west"])


def test_bad_input_is_named_and_not_started_again(launched):
    hellos, said = launched(USAGE)
    assert hellos == 2
    assert said[1:] == ["process 1 (site west) failed first, exit code 2; its last lines:"]


@pytest.mark.parametrize("code", [FAILURE, HANG])
def test_what_failed_is_started_again(launched, code):
    hellos, said = launched(code)
    assert hellos == 4
    assert "restart 1 of 1, from the newest checkpoint" in said
