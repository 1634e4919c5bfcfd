"""Help is as wide as the terminal, and says types in words."""

from typing import Annotated

import pytest

from geojax.cli.help_pages import help_of_section, help_of_verb, overview
from geojax.cli.main import run
from geojax.cli.type_words import in_words
from geojax.cli.verbs import VERBS, arguments_class, summary
from geojax.layout_names import WireName
from geojax.quantities import Bytes, Count, Seconds
from geojax.settings import AUTO, NUMBER, UNLESS_AUTO


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", VERBS)
def test_no_line_of_a_verbs_help_is_wider_than_the_terminal(name):
    lines = help_of_verb(name).splitlines()
    assert lines[0].startswith(f"usage: geojax {name}")
    assert max(map(len, lines)) <= 80
    assert not any(word in line for line in lines for word in ("INT", "{None}", "typing."))


def test_a_terminal_of_another_width_is_filled(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert 55 < max(map(len, help_of_verb("train").splitlines())) <= 60
    assert max(map(len, overview().splitlines())) <= 60


def test_the_verbs_of_a_group_are_listed(capsys):
    assert run(["config", "--help"]) == 0
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "  config" in line]
    assert names == ["show", "diff", "new", "schema"]


def test_a_config_after_help_is_no_section(capsys):
    assert run(["train", "--help", "run.yaml"]) == 0
    assert capsys.readouterr().out.startswith("usage: geojax train")


def test_a_verb_that_takes_settings_lists_the_sections():
    for name, verb in VERBS.items():
        lines = help_of_verb(name).splitlines()
        sections = [line for line in lines if line.startswith("  optimizer  ")]
        assert len(sections) == verb.changes_settings


@pytest.mark.parametrize("key", ["model", "pipeline", "communication", "topology", "base"])
def test_no_line_of_a_section_is_wider_than_the_terminal(key):
    assert max(map(len, help_of_section(key).splitlines())) <= 80


def test_the_summary_of_a_verb_is_the_beginning_of_its_class():
    for name in VERBS:
        written = " ".join((arguments_class(name).__doc__ or "").split())
        assert summary(name)
        assert written.startswith(summary(name))


def test_options_have_their_types_in_words_and_their_defaults():
    lines = help_of_verb("wan up").splitlines()
    assert "  --rtt  a number of seconds  (0)" in lines
    assert "  --loss  a share, such as 0.1%  (0)" in lines
    lines = help_of_verb("generate").splitlines()
    assert "  --prompt  text, may be repeated" in lines
    assert "  --mesh.tensor  a whole number  (1)" in lines
    assert "  --output PATH" not in lines


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Count, "a whole number"),
        (Seconds | None, "a number of seconds or `null`"),
        (tuple[Count, ...], "a list of whole numbers"),
        (bool, "`true` or `false`"),
        (AUTO | bool, "`auto`, `true` or `false`"),
        (WireName, "`none`, `bf16` or `int8`"),
        (dict[str, int], "a mapping"),
    ],
)
def test_a_type_in_words(annotation, words):
    assert in_words(annotation) == words


def test_auto_comes_first_and_null_last():
    mixed = Annotated[Annotated[Bytes | None, NUMBER] | AUTO, UNLESS_AUTO]
    assert in_words(mixed) == "`auto`, a number of bytes or `null`"
    assert in_words(mixed, may_be_absent=True) == "`auto` or a number of bytes"
