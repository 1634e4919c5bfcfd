"""Documents that Megatron-LM has tokenized, against an index that is written here by its format."""

import numpy as np
import pytest
from support.indexed_files import CODES, write_indexed

from geojax.cli.data import PrepareCommand, run
from geojax.data import Prepared
from geojax.data.megatron import indexed
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer and the path of its file."""
    made = Tokenizer.train(["one two three four"], vocabulary_size=270)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(path)
    return made, path


def write_index(*arguments, **options):
    return str(write_indexed(*arguments, **options))


def prepared(files, tokenizer, output, **settings):
    assert run(PrepareCommand(files=files, output=output, tokenizer=tokenizer, **settings)) == 0
    return Prepared(output)


@pytest.mark.parametrize("dtype", CODES)
def test_tokens_are_those_that_the_text_would_have(tmp_path, tokenizer, dtype, monkeypatch):
    monkeypatch.setattr(indexed, "PIECE_TOKENS", 3)
    words, path = tokenizer
    texts = ["one two", "three four one two three", "four"]
    first, second, third = (words.encode(text) for text in texts)
    documents = [
        [[*first, words.eos_id]],  # as Megatron-LM writes them
        [second[:2], second[2:]],  # in sentences
        [[]],
        [[words.bos_id, *third, words.eos_id]],
        [[]],
    ]
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    index = write_index(tmp_path / "tokens.idx", documents, dtype)
    from_text = prepared((str(tmp_path / "lines.jsonl"),), path, tmp_path / "text")
    from_tokens = prepared((index,), path, tmp_path / "tokens")
    assert from_tokens.manifest.splits == from_text.manifest.splits
    assert from_tokens.manifest.splits["train"].documents == 3


def test_a_share_is_held_out_and_documents_stay_whole(tmp_path, tokenizer, capsys):
    words, path = tokenizer
    documents = [[[*words.encode(f"one {number}"), words.eos_id]] for number in range(200)]
    (tmp_path / "in").mkdir()
    write_index(tmp_path / "in" / "tokens.idx", documents)
    made = prepared((str(tmp_path / "in"),), path, tmp_path / "out", validation_fraction=0.2)
    counts = {name: split.documents for name, split in made.manifest.splits.items()}
    assert sum(counts.values()) == 200
    assert 20 < counts["validation"] < 60
    stream = made.stream("validation")
    ids = stream.read(0, len(stream)).tolist()
    assert ids.count(words.bos_id) == ids.count(words.eos_id) == counts["validation"]
    assert "bytes of text" not in capsys.readouterr().out


def test_bytes_a_token_are_those_of_the_text_alone(tmp_path, tokenizer, capsys):
    words, path = tokenizer
    (tmp_path / "a.txt").write_text("one two")
    write_index(tmp_path / "b.idx", [[words.encode("three four") * 50]])
    files = (str(tmp_path / "a.txt"), str(tmp_path / "b.idx"))
    made = prepared(files, path, tmp_path / "mixed")
    of_text = len(words.encode("one two")) + 2
    assert made.manifest.text_tokens == of_text
    assert f"{7 / of_text:.2f} bytes of text per token" in capsys.readouterr().out
    assert prepared(files[:1], path, tmp_path / "text").manifest.text_tokens is None


def broken(tmp_path, words):
    """Commands that must end in one line, and a part of it."""
    good = [[words.encode("one two")], [words.encode("three")]]
    strange = write_index(tmp_path / "strange.idx", [[[0, 300, 1]]])
    cut = tmp_path / "cut.idx"
    write_index(cut, good)
    cut.write_bytes(cut.read_bytes()[:-3])
    short = tmp_path / "short.idx"
    write_index(short, good)
    short.with_suffix(".bin").write_bytes(b"ab")
    alone = tmp_path / "alone.idx"
    write_index(alone, good)
    alone.with_suffix(".bin").unlink()
    other = tmp_path / "other.idx"
    other.write_bytes(bytes(100))
    other.with_suffix(".bin").write_bytes(bytes(4))
    floats = write_index(tmp_path / "floats.idx", good, code=7)
    backwards = tmp_path / "backwards.idx"
    write_index(backwards, good)
    content = bytearray(backwards.read_bytes())
    content[34 + 4 : 34 + 8] = np.int32(-1).tobytes()
    backwards.write_bytes(content)
    outside = tmp_path / "outside.idx"
    write_index(outside, good)
    content = bytearray(outside.read_bytes())
    content[34 + 8 + 8 : 34 + 8 + 16] = np.int64(2**62).tobytes()
    outside.write_bytes(content)
    unordered = tmp_path / "unordered.idx"
    write_index(unordered, good)
    content = bytearray(unordered.read_bytes())
    content[-16:-8] = np.int64(7).tobytes()
    unordered.write_bytes(content)
    for file in (backwards, outside, unordered):
        yield str(file), "its sequences do not follow one another"
    yield strange, "document 0 has the token 300, and the tokenizer"
    yield str(cut), "bytes long where its header says"
    yield str(short), "describes .* bytes of tokens, and short.bin has 2"
    yield str(alone), "its tokens, alone.bin, are not beside it"
    yield str(other), "no index of Megatron-LM's"
    yield floats, "data type 7"
    yield str(cut.with_suffix(".bin")), "name cut.idx beside it"


def test_what_cannot_be_read_is_named_in_one_line_and_leaves_nothing(tmp_path, tokenizer):
    words, path = tokenizer
    for file, message in broken(tmp_path, words):
        with pytest.raises(UserError, match=message) as error:
            prepared((file,), path, tmp_path / "out")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()


def test_a_tokenizer_is_asked_for(tmp_path, tokenizer):
    index = write_index(tmp_path / "tokens.idx", [[tokenizer[0].encode("one")]])
    with pytest.raises(UserError, match="holds tokens, not text; name the tokenizer"):
        prepared((index,), None, tmp_path / "out")
