"""The folder of an export is looked at before the run is opened."""

import pytest

from geojax.cli.main import run as geojax


@pytest.mark.parametrize("output", [".", "/", "/dev/null"])
def test_an_output_that_is_taken_is_refused(output, capsys):
    assert geojax(["export", "/nowhere/run", "--output", output]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "exists already; remove it or choose another output" in line
