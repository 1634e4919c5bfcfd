import json
import random
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.data import Tokenizer, pack
from geojax.data import tokenizer as tokenizer_module
from geojax.data.packing import window_of_tokens
from geojax.errors import UserError

TRAINED = Tokenizer.train(
    ["def f(x):\n    return x\n", "for x in range(9): print(x)"] * 9, vocabulary_size=290
)


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives(text):
    ids = TRAINED.encode(text)
    assert TRAINED.decode(ids) == text
    assert not {TRAINED.bos_id, TRAINED.eos_id} & set(ids)


def test_special_tokens_in_a_text_are_text():
    text = f"a {TRAINED.beginning} b {TRAINED.end}"
    ids = TRAINED.encode_batch([text])[0]
    assert not {TRAINED.bos_id, TRAINED.eos_id} & set(ids)
    assert TRAINED.decode(ids) == text


def test_special_tokens_have_no_text():
    assert TRAINED.decode([TRAINED.bos_id, *TRAINED.encode("x"), TRAINED.eos_id]) == "x"


def test_save_and_load(tmp_path):
    TRAINED.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == TRAINED.fingerprint
    assert (loaded.bos_id, loaded.eos_id) == (TRAINED.bos_id, TRAINED.eos_id)
    assert loaded.vocabulary_size == TRAINED.vocabulary_size <= 290


def test_training_is_deterministic():
    again = Tokenizer.train(
        ["def f(x):\n    return x\n", "for x in range(9): print(x)"] * 9, vocabulary_size=290
    )
    assert again.fingerprint == TRAINED.fingerprint


def content_with(*tokens, ids=None):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens(list(tokens))
    return backend.to_str().encode()


@pytest.mark.parametrize(
    ("tokens", "pair"),
    [
        (["<s>", "</s>"], ("<s>", "</s>")),
        (
            ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
            ("<|begin_of_text|>", "<|end_of_text|>"),
        ),
        (["<|endoftext|>"], ("<|endoftext|>", "<|endoftext|>")),
    ],
)
def test_known_names_are_found(tokens, pair):
    tokenizer = Tokenizer(content_with(*tokens), source="a file")
    assert (tokenizer.beginning, tokenizer.end) == pair


def test_unknown_names_must_be_given():
    content = content_with("<<", ">>")
    with pytest.raises(UserError, match="a file: no token for the beginning and the end"):
        Tokenizer(content, source="a file")
    with pytest.raises(UserError, match="a file: has no token '<s>'"):
        Tokenizer(content, beginning="<s>", end=">>", source="a file")
    tokenizer = Tokenizer(content, beginning="<<", end=">>", source="a file")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_vocabulary_size_counts_holes():
    content = json.loads(content_with("<s>", "</s>"))
    content["added_tokens"][1]["id"] = 700
    # The library renumbers added tokens unless the model knows them.
    content["model"]["vocab"] = {"<s>": 0, "</s>": 700}
    tokenizer = Tokenizer(json.dumps(content).encode(), source="a file")
    assert tokenizer.vocabulary_size == 701


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_not_a_tokenizer(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a tokenizer"):
        Tokenizer.load(path)
    with pytest.raises(UserError, match=r"cannot be read .*; give the path of a tokenizer\.json"):
        Tokenizer.load(tmp_path / "other.json")


def test_one_token_for_both_ends_keeps_the_end_in_the_loss():
    tokenizer = Tokenizer(content_with("<|endoftext|>", "a"), source="a file")
    batch = pack(window_of_tokens(np.array([[1, 1, 0, 1, 1, 0, 1]]), tokenizer))
    np.testing.assert_array_equal(batch["segment_ids"], [[1, 1, 2, 2, 2, 3]])
    np.testing.assert_array_equal(batch["positions"], [[0, 1, 0, 1, 2, 0]])
    np.testing.assert_array_equal(batch["loss_mask"], np.ones((1, 6)))


RUNS = ["x" * 5000, "\n" * 5000, "7" * 5000, "😀" * 5000, "ab " + "c" * 5000 + " de" * 500]


@pytest.mark.parametrize("text", RUNS)
def test_runs_without_a_word_break_are_cut_for_the_training(text):
    """The trainer's time is quadratic in the length of a word."""
    parts = list(tokenizer_module._cut_runs(text))
    assert set("".join(parts)) == set(text)
    assert sum(map(len, parts)) <= min(len(text), 3000), "what repeats counts once"
    words = [word for part in parts for word in re.findall(r"\w+|\s+|[^\w\s]+", part)]
    assert max(map(len, words)) < 2 * tokenizer_module.RUN_CHARACTERS


def test_what_does_not_repeat_is_all_trained_on():
    draw = random.Random(3)
    text = "".join(draw.choice("abcdef") for _ in range(5000))
    assert "".join(tokenizer_module._cut_runs(text)) == text


def test_texts_with_words_are_trained_on_as_they_are():
    text = "def f(x):\n    return 12345 * x  # öne\n" * 200
    assert list(tokenizer_module._cut_runs(text)) == [text]


def file_with(vocabulary, **model):
    content = json.loads(content_with("<s>", "</s>"))
    content["model"] = {"vocab": {"<s>": 0, "</s>": 1, **vocabulary}, **model}
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            file_with({"z": 4294967295}, type="BPE", merges=[]),
            "a file: token 'z' has the number 4,294,967,295; at most 16,777,215",
        ),
        (
            file_with({}, type="BPE", merges=[], unk_token="none"),
            r"a file: this tokenizer cannot encode a text \(Unk token `none` not found",
        ),
        (
            file_with({}, type="WordLevel", unk_token="none"),
            r"a file: this tokenizer cannot encode a text \(WordLevel error: Missing",
        ),
    ],
)
def test_a_vocabulary_that_no_text_can_be_encoded_with_is_refused(content, message):
    with pytest.raises(UserError, match=message):
        Tokenizer(content, source="a file")
