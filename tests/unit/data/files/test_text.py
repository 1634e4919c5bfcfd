"""Long documents come in pieces that end where a tokenizer would part them anyway."""

import pytest

from geojax.data.files import text
from geojax.data.files.text import split_text


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(text, "PIECE_CHARACTERS", 16)


@pytest.mark.parametrize(
    "document",
    ["", "a", "a" * 16, "a" * 200, "word " * 60, "a line\n" * 40, "a" * 40 + " b" * 40 + "\n"],
)
def test_pieces_are_the_document(document):
    pieces = list(split_text(document))
    assert "".join(piece.text for piece in pieces) == document
    assert [piece.first for piece in pieces] == [index == 0 for index in range(len(pieces))]
    assert sum(piece.last for piece in pieces) == bool(document)
    assert all(len(piece.text) <= 48 for piece in pieces)


def test_a_piece_ends_with_a_line_and_else_with_a_word():
    assert all(piece.text.endswith("\n") for piece in split_text("a line\n" * 40))
    starts = [piece.text[:2] for piece in split_text("word " * 60)]
    assert starts[1:] == [" w"] * (len(starts) - 1)
    assert [len(piece.text) for piece in split_text("a" * 64)] == [32, 32]
