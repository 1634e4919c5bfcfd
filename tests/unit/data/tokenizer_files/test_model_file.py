"""The kind of a file follows from its content."""

import pytest
from support.tokenizer_files import sentencepiece_model

from geojax.data import Tokenizer
from geojax.data.tokenizer_files import model_file
from geojax.errors import UserError


def test_the_suffix_does_not_tell_the_kind(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(sentencepiece_model())
    assert Tokenizer.load(path).eos_id == 2
    path = tmp_path / "tokenizer.model"
    Tokenizer.train(["one"], vocabulary_size=258).save(path)
    assert Tokenizer.load(path).eos_id == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a tokenizer of a known kind; give the path of a tokenizer.json"),
        (b"\x80\x04K\x01.", "not a tokenizer of a known kind"),
        (b"one two three\n", "not a tokenizer of a known kind"),
        (b"\n\xff", "not a tokenizer of a known kind"),
        (b'{"one": 1}', "not a tokenizer.json"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
            "is a pointer of Git LFS, not the file; `git lfs pull` fetches the file",
        ),
        (b"x" * 99, "has more than 64 bytes, which no tokenizer has"),
    ],
)
def test_files_that_are_refused_in_one_line(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "MOST_BYTES", 64)
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        Tokenizer.load(path)
    assert "\n" not in str(error.value)
