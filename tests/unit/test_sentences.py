"""docs/sentences.py finds each sentence of a page, with its line and its words."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "sentences.py"
specification = importlib.util.spec_from_file_location("sentences", SCRIPT)
sentences = importlib.util.module_from_spec(specification)
specification.loader.exec_module(sentences)


def texts(page):
    return [sentence.text for sentence in sentences.sentences(page)]


def words(count):
    return " ".join(["word"] * count)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("One. Two!\nThree?", ["One.", "Two!", "Three?"]),
        ("geojax trains. geojax saves.", ["geojax trains.", "geojax saves."]),
        ("Read `a file`. Then `b.`", ["Read `a_file`.", "Then `b.`"]),
        ("A `b. c d` e.", ["A `b._c_d` e."]),
        ("**Bold.** Plain (aside.) Next.", ["**Bold.**", "Plain (aside.)", "Next."]),
        ("See [the page. It is](a.md) long.", ["See the page.", "It is long."]),
        (
            "As in e.g. one, cf. two, Seide et al. 2014.",
            ["As in e.g one, cf two, Seide et al 2014."],
        ),
        (
            "Add `a`, `b`, ... and more ... Then stop.",
            ["Add `a`, `b`, ... and more ...", "Then stop."],
        ),
        ("3.5 of 1.0.2 pass.", ["3.5 of 1.0.2 pass."]),
        ("Steps: 1. one; 2. two.", ["Steps: 1 one; 2 two."]),
        ("> Quoted text.\n> More of it.", ["Quoted text.", "More of it."]),
    ],
)
def test_sentences_end_where_a_reader_ends_them(page, expected):
    assert texts(page) == expected


@pytest.mark.parametrize(
    "page",
    [
        "# Heading of words",
        "| cell | cell |\n|---|---|\n| A. B. | c |",
        "```\ncode. More code.\n```",
        "````\n```\ncode\n```\nstill code\n````",
        "~~~yaml\nkey: value\n~~~",
        "    indented code",
        "![A picture of\ntwo sites](picture.svg)",
        "<img src='a.png'\n     width='3'>",
        "[1]: https://example.com/page",
        "---",
    ],
)
def test_only_prose_counts(page):
    assert texts(page) == []
    assert texts(f"Before.\n\n{page}\n\nAfter.") == ["Before.", "After."]


def test_prose_around_code_and_tables_is_cut_there():
    page = "This runs\n```\ncode\n```\nin a shell.\n| a | b |\nAfter the table"
    assert texts(page) == ["This runs", "in a shell.", "After the table"]


def test_each_item_of_a_list_is_a_paragraph():
    page = "The list:\n- one thing\n  that goes on\n* two\n1. three\n2) four"
    assert texts(page) == ["The list:", "one thing that goes on", "two", "three", "four"]


def test_a_sentence_has_the_line_that_it_begins_on():
    page = "# Title\n\nOne sentence on\ntwo lines. Another\none. `Code over\nlines` ends.\nLast."
    assert [sentence.line for sentence in sentences.sentences(page)] == [3, 4, 5, 7]


def test_words_hold_a_letter_or_a_digit():
    (sentence,) = sentences.sentences("Two - sites + `one long command` = 3 [words](of/a/link.md).")
    assert sentence.words == 5


def test_a_sentence_of_26_words_is_too_long_and_one_of_25_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sentences, "REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{words(25)}.\n{words(26)}. The end.\n")
    monkeypatch.setattr("sys.argv", ["sentences.py", str(page)])
    assert sentences.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("page.md:4: 26 words: word word")
    page.write_text(f"{words(25)}.\n")
    assert sentences.main() == 0
