"""The examples on the page about models."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_its_examples_do_what_it_says():
    found = doctest.testfile(str(PAGE), module_relative=False)
    assert found.attempted >= 9
    assert found.failed == 0
