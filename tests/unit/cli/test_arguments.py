"""Arguments of subcommands: read by tyro, and validated like a config."""

from typing import Annotated

import pydantic
import pytest
import tyro

from geojax.cli.arguments import REGISTRY, UncheckedArguments, arguments_of
from geojax.errors import UserError
from geojax.planner.search.choices import OpenChoices
from geojax.quantities import Seconds
from geojax.settings import Settings, validate


class Example(Settings):
    """An example."""

    names: tuple[str, ...] | None = None
    """Names."""
    delay: Seconds = 0.5
    """A delay."""
    count: Annotated[int, pydantic.Field(ge=1, le=9)] | None = None
    """A count."""
    choices: Annotated[OpenChoices, tyro.conf.arg(name="")] = OpenChoices()
    """Choices."""
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None
    """A file."""
    loud: bool = False
    """A flag."""


def read(*arguments):
    with REGISTRY:
        given = tyro.cli(Example, args=arguments)
    assert isinstance(given, UncheckedArguments)
    return validate(given.settings, given.values, "example")


def test_numbers_have_units_and_bounds():
    example = read("--delay", "20ms", "--count", "3", "--json", "a.json", "--roles", "data")
    assert (example.delay, example.count, example.json_file) == (0.02, 3, "a.json")
    assert example.choices == OpenChoices(roles=("data",))
    assert read() == Example()
    with pytest.raises(
        UserError, match=r"^example: count: input should be less than or equal to 9"
    ):
        read("--count", "10")
    with pytest.raises(UserError, match=r"^example: delay: 'soon' is not a number of seconds"):
        read("--delay", "soon")


def test_a_list_may_be_absent_or_empty():
    assert read().names is None
    assert read("--names").names == ()
    assert read("--names", "a", "b").names == ("a", "b")


def test_groups_without_a_name_count_by_their_own_arguments():
    known = {argument.name: argument for argument in arguments_of(Example)}
    groups = ["roles", "joins", "precisions", "compressions"]
    assert list(known) == ["names", "delay", "count", *groups, "json", "loud"]
    alone = [name for name, argument in known.items() if argument.may_stand_alone]
    assert alone == ["names", "loud"]
    assert known["json"].field == "json_file"
    assert not any(argument.is_required for argument in known.values())
