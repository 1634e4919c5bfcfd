"""The place of each value of a config."""

import pytest

from geojax.errors import MistakesError
from geojax.origins import Origins, ValuePlace
from geojax.settings import Settings, load_settings, load_with_origins


class Inner(Settings):
    size: int
    name: str = ""


class Outer(Settings):
    inner: Inner
    items: tuple[Inner, ...] = ()
    count: int | None = None


def test_a_value_without_a_place_has_that_of_its_group():
    origins = Origins("run.yaml", {("a",): ValuePlace("run.yaml", 3)})
    assert str(origins.of(("a", "b", "0"))) == "run.yaml:3"
    assert str(origins.of(("c",))) == "run.yaml"


def test_a_replaced_group_forgets_the_lines_below():
    line = ValuePlace("run.yaml", 1)
    origins = Origins("run.yaml", {("a",): line, ("a", "b"): line, ("ab",): line})
    origins.replace(("a",), ValuePlace("--a"))
    assert origins.places == {("ab",): line, ("a",): ValuePlace("--a")}


def test_every_key_and_item_has_its_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "common: &common\n  size: 1\n\ninner:\n  <<: *common\n  name: x\nitems: [{size: 2},\n  3]\n"
    )
    content, origins = load_with_origins(path)
    assert content["inner"] == {"size": 1, "name": "x"}
    lines = {".".join(key): place.line for key, place in origins.places.items()}
    assert lines == {
        "common": 1,
        "common.size": 2,
        "inner": 4,
        "inner.size": 2,
        "inner.name": 6,
        "items": 7,
        "items.0": 7,
        "items.0.size": 7,
        "items.1": 8,
    }


def test_all_mistakes_of_a_file_are_named_in_its_order(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("count: x\ninner:\n  name: 3\n  sise: 1\nitems:\n- {size: 1}\n- {}\nextra: 1\n")
    with pytest.raises(MistakesError) as caught:
        load_settings(Outer, path)
    assert [line.removeprefix(f"{tmp_path}/") for line in caught.value.lines] == [
        "a.yaml:1: count: input should be a valid integer, unable to parse string as an integer, "
        "not 'x' (str)",
        "a.yaml:3: inner.name: input should be a valid string, not 3 (int)",
        "a.yaml:4: inner.sise: unknown key; did you mean 'size'?",
        "a.yaml:7: items.1.size: is required and missing",
        "a.yaml:8: extra: unknown key; there are: count, inner, items",
    ]
    assert str(caught.value) == "\n".join(caught.value.lines)
