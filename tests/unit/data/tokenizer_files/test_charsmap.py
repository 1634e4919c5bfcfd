# ruff: noqa: RUF001
from pathlib import Path

import pytest
import tokenizers
from support.tokenizer_files import charsmap

from geojax.data.tokenizer_files.charsmap import normalizers_of, read_rules
from geojax.data.tokenizer_files.content import tokenizer_json
from geojax.errors import UserError

PATH = Path("m.model")
RULES = {
    **{"ａ": "a", "①": "1", "½": "1⁄2", "\x01": "", "\r": " ", "\n": " "},
    **{"a\u0301": "á", "e\u0302": "ê", "e\u0302\u0301": "ế", "o\u0301": "ó"},
}


def normalized(rules, text):
    content = tokenizer_json(
        {"type": "BPE", "vocab": {}, "merges": []},
        {},
        normalizers=normalizers_of(PATH, charsmap(rules)),
    )
    return tokenizers.Tokenizer.from_buffer(content).normalizer.normalize_str(text)


def test_a_table_is_read_back():
    assert read_rules(PATH, charsmap(RULES)) == RULES
    assert normalizers_of(PATH, b"") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ａ①½x", "a11⁄2x"),
        ("a\u0301", "á"),
        ("ａ\u0301", "á"),
        # The library's own step drops the second of two accents.
        ("e\u0302\u0301", "ế"),
        ("½\u0301", "1⁄2\u0301"),
        ("\r\n", "  "),
        # A letter that is composed already, and accents in another order, stay.
        ("ê\u0301", "ê\u0301"),
        ("á\u0323", "á\u0323"),
        ("\u0301a", "\u0301a"),
        ("\u0651\u064e", "\u0651\u064e"),
        ("", ""),
    ],
)
def test_a_text_is_rewritten_as_the_table_says(text, expected):
    assert normalized(RULES, text) == expected


def test_characters_that_a_table_does_not_remove_stay():
    rules = {key: value for key, value in RULES.items() if key != "\x01"}
    assert normalized(rules, "\x01a\u0301") == "\x01á"


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (charsmap({"ab": "x"}), "rewrites 'ab' to 'x'; only rules for single characters"),
        (charsmap(RULES)[:2000], "is damaged; fetch the file again"),
        (charsmap(RULES)[:-4], r"is damaged \(.*; fetch"),
        (b"\4\0\0\0\0\1\0\0", "is damaged"),
        (b"\xff" * 64, "is damaged"),
        (b"\5\0\0\0aaaaaaaa", "is damaged"),
    ],
)
def test_other_tables_are_refused_in_one_line(blob, message):
    with pytest.raises(UserError, match=message) as error:
        normalizers_of(PATH, blob)
    assert "\n" not in str(error.value)
