"""YAML that is wrong, large or malicious ends in one line with its number, and at once."""

import pytest

from geojax.yaml_syntax import MOST_BYTES, YamlError, parse

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 10)}]\n" for name in "bcdefgh"
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1e-3", {"a": 1e-3}),
        ("a: 2024-01-05", {"a": "2024-01-05"}),
        ("a: 2024-13-45", {"a": "2024-13-45"}),
        ("a: =", {"a": "="}),
        ("a: &n {b: 1}\nc: *n", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &n {b: 1}\nc: {<<: *n, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    ],
)
def test_what_is_valid(text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 0b_", "'0b_' is no valid int"),
        ("a: !!float x", "'x' is no valid float"),
        ("a: !!int ''", "'' is no valid int"),
        ("a: !!bool x", "'x' is no valid bool"),
        ("a: !!map [1, 2]", "expected a mapping of keys, but found none"),
        ("a: !!map x", "expected a mapping of keys, but found none"),
        ("a: !<tag:yaml.org,2002:map> [1]", "expected a mapping of keys, but found none"),
        ("a: !!seq {b: 1}", "expected a sequence node, but found mapping"),
        ("a: !!str {=: 3}", "expected a scalar node, but found mapping"),
        ("a: !!int [1]", "expected a scalar node, but found sequence"),
        ("a: !!set {b}", "the tag '!!set' is none of !!map, !!seq"),
        ("a: !!omap [1]", "the tag '!!omap' is none of"),
        ("a: !!pairs [b: 1]", "the tag '!!pairs' is none of"),
        ("a: !!timestamp x", "the tag '!!timestamp' is none of"),
        ("a: !!binary x", "the tag '!!binary' is none of"),
        ("a: !!python/object/apply:os.getcwd []", "is none of"),
        ("a: !own {}", "the tag '!own' is none of"),
        ("<<: 1", "expected a mapping or list of mappings for merging"),
        ("<<: !!map [1]", "expected a mapping for merging"),
        ("a: &a {<<: *a}", "the alias '*a' stands for itself"),
        ("a: " + "9" * 5000, "is no valid int"),
        ("a: 0x" + "f" * 5000, "is beyond what 64 bits hold"),
        (r'a: "\0"', "holds a character that is no text"),
        (r'a: "\ud800"', "holds a character that is no text"),
        (r'a: "\U00110000"', "chr"),
        ("? [1]\n: 2", "unhashable key"),
        ("a: 1\na: 2", "the key 'a' is given twice"),
        ("a: &a [*a]", "the alias '*a' stands for itself"),
        (LAUGHS, "those of aliases included"),
        ("[" * 100_000, "levels of mappings and lists in each other"),
        ("- " * 1000, "levels of mappings and lists in each other"),
        ("x" * (MOST_BYTES + 1), "characters are too many"),
    ],
)
@pytest.mark.timeout(20)
def test_what_is_not_is_named(text, problem):
    with pytest.raises(YamlError) as error:
        parse(text)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200
