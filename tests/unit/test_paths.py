"""One rule for all paths of configs and commands."""

import os
from pathlib import Path

import pytest

from geojax.cli.main import run
from geojax.data import DataSettings
from geojax.data.files.formats import find_files
from geojax.errors import UserError
from geojax.paths import expanded_path, resolved_path
from geojax.settings import validate


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Run in a folder of its own, with a home beside it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("runs/a", "here/runs/a"),
        ("../runs/a", "runs/a"),
        (".", "here"),
        ("./a/../b//c/", "here/b/c"),
        ("~", "home"),
        ("~/runs/../a", "home/a"),
        ("..", ""),
        ("a$b", "here/a$b"),
    ],
)
def test_a_path_is_absolute_and_plain(folder, given, wanted):
    assert resolved_path(given) == folder / wanted


def test_links_to_folders_are_followed_and_links_to_files_keep_their_neighbors(folder):
    (folder / "disk" / "deep").mkdir(parents=True)
    (folder / "disk" / "blob").write_text("")
    Path("run").symlink_to(folder / "disk" / "deep")
    Path("tokenizer.json").symlink_to(folder / "disk" / "blob")
    assert resolved_path("run") == folder / "disk" / "deep"
    assert resolved_path("run/../x") == folder / "disk" / "x"
    assert resolved_path("tokenizer.json") == folder / "here" / "tokenizer.json"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "the path is empty"),
        ("${HOME}/x", r"holds the variable \$\{HOME\}, which geojax does not expand"),
        ("$HOME", r"holds the variable \$HOME"),
        ("runs/$USER/x", r"holds the variable \$USER"),
        ("~nouser/x", "~nouser has no home folder here"),
        ("a\nb", "holds a control character"),
        ("gs://bucket/x", "is a URL"),
        ("circle/x", "circle of links"),
    ],
)
def test_what_is_no_path_is_refused_in_one_line(folder, given, told):
    Path("circle").symlink_to("circle")
    with pytest.raises(UserError, match=told) as refusal:
        resolved_path(given)
    assert "\n" not in str(refusal.value)


def test_a_folder_that_was_removed_is_named(folder):
    os.rmdir(folder / "here")
    with pytest.raises(UserError, match="current folder, which has been removed"):
        resolved_path("x")


def test_a_pattern_is_expanded_and_not_resolved(folder):
    assert expanded_path("~/**/*.txt") == folder / "home" / "**" / "*.txt"
    with pytest.raises(UserError, match="~nouser has no home folder"):
        find_files(["~nouser/*.txt"])


def test_the_sources_of_a_run_follow_the_rule(folder):
    source = {"name": "a", "prepared": "../data"}
    settings = validate(DataSettings, {"sources": [source]}, "run.yaml")
    assert settings.sources[0].prepared == folder / "data"
    with pytest.raises(UserError, match=r"run.yaml: sources.0.prepared: the path is empty"):
        validate(DataSettings, {"sources": [source | {"prepared": ""}]}, "run.yaml")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "~nouser/run", "--prompt", "x"],
        ["evaluate", "run", "--data", "$DATA"],
        ["export", "run", "--output", "${HOME}/x"],
        ["data", "prepare", "a.txt", "--output", "~nouser/x"],
    ],
)
def test_options_follow_the_rule(folder, capsys, arguments):
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: geojax ")
    assert error.count("\n") == 1
