import json

import pytest
from support.tokenizer_files import (
    PIECES,
    USER_DEFINED,
    ranks,
    sentencepiece_model,
    write_vocabulary,
)

from geojax.data import Tokenizer
from geojax.errors import UserError


def write(folder, **files):
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture
def fast(tmp_path):
    """A folder of a byte-level tokenizer with 258 tokens."""
    Tokenizer.train(["one two"], vocabulary_size=258).save(tmp_path / "tokenizer.json")
    return tmp_path


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({}, (0, 1)),
        ({"bos_token": None, "eos_token": "<|end|>"}, (1, 1)),
        ({"bos_token": {"content": "a"}, "eos_token": {"content": "<|end|>"}}, (66, 1)),
    ],
)
def test_the_config_names_the_ends_of_a_document(fast, config, ends):
    write(fast, tokenizer_config=config, special_tokens_map={"bos_token": "b"} if config else {})
    tokenizer = Tokenizer.load(fast)
    assert (tokenizer.bos_id, tokenizer.eos_id) == ends
    assert tokenizer.fingerprint == Tokenizer.load(fast / "tokenizer.json").fingerprint
    assert Tokenizer.load(fast, beginning="c", end="d").beginning == "c"


def test_special_tokens_map_serves_where_the_config_has_no_such_key(fast):
    write(fast, special_tokens_map={"eos_token": "<|begin|>"})
    assert Tokenizer.load(fast).eos_id == 0


def test_tokens_of_the_config_are_added_with_their_numbers(fast):
    added = {"258": {"content": "<|im_end|>", "special": True}, "0": {"content": "<|begin|>"}}
    write(fast, tokenizer_config={"added_tokens_decoder": added, "eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.load(fast)
    assert tokenizer.eos_id == 258
    assert tokenizer.encode_with_special_tokens("a<|im_end|>").ids == [66, 258]
    assert 258 not in tokenizer.encode("a<|im_end|>")


def test_programs_are_not_run(fast):
    write(fast, tokenizer_config={"auto_map": {"AutoTokenizer": ["mine.py", None]}})
    (fast / "mine.py").write_text("raise SystemExit")
    assert Tokenizer.load(fast).eos_id == 1


def test_vocabulary_and_merges_are_gpt2s(tmp_path):
    write_vocabulary(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("abc") == [257]
    assert tokenizer.decode(tokenizer.encode("öne <|endoftext|>")) == "öne <|endoftext|>"
    assert tokenizer.bos_id == tokenizer.eos_id == 258
    assert 258 not in tokenizer.encode("<|endoftext|>")
    write(tmp_path, added_tokens={"[PAD]": 259}, special_tokens_map={"pad_token": "[PAD]"})
    assert Tokenizer.load(tmp_path).id_of("[PAD]") == 259


def test_a_sentencepiece_model_takes_tokens_and_ends_of_the_config(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(
        sentencepiece_model([*PIECES, ("<bc>", 0.0, USER_DEFINED)])
    )
    last = len(PIECES)
    added = {
        "1": {"content": "<s>", "special": True},
        str(last): {"content": "<bc>", "special": True},
        str(last + 1): {"content": "<|im_end|>", "special": True},
    }
    config = {"tokenizer_class": "LlamaTokenizerFast", "added_tokens_decoder": added}
    write(tmp_path, tokenizer_config={**config, "eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_id == last + 1
    assert last not in tokenizer.encode("a<bc>")
    assert last in tokenizer.encode_with_special_tokens("a<bc>").ids


def test_a_folder_of_one_model_under_two_names(tmp_path):
    for name in ("tokenizer.model", "other.model"):
        (tmp_path / name).write_bytes(sentencepiece_model())
    assert Tokenizer.load(tmp_path).eos_id == 2


def two_kinds(folder):
    write_vocabulary(folder)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())


def two_models(folder):
    (folder / "a.model").write_bytes(sentencepiece_model())
    (folder / "b.tiktoken").write_bytes(ranks())


def merges_alone(folder):
    write_vocabulary(folder)
    (folder / "vocab.json").unlink()


def vocabulary_alone(folder):
    write_vocabulary(folder)
    (folder / "merges.txt").unlink()


def other_merges(folder):
    write_vocabulary(folder)
    (folder / "merges.txt").write_text("a b\nx y\n")


def words(folder):
    write_vocabulary(folder)
    write(folder, vocab={"one": 0})


def twice(folder):
    write_vocabulary(folder, ["ab", "abc"])
    numbers = json.loads((folder / "vocab.json").read_text())
    write(folder, vocab={**numbers, "abc": numbers["ab"]})


def of_class(name):
    def make(folder):
        (folder / "tokenizer.model").write_bytes(sentencepiece_model())
        write(folder, tokenizer_config={"tokenizer_class": name})

    return make


def fast_with(**config):
    def make(folder):
        Tokenizer.train(["one two"], vocabulary_size=258).save(folder / "tokenizer.json")
        write(folder, tokenizer_config=config)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "holds no tokenizer; a tokenizer.json, a vocab.json with merges.txt"),
        (two_kinds, "holds two tokenizers, tokenizer.model and vocab.json; give the path of one"),
        (two_models, "holds two tokenizers, a.model and b.tiktoken"),
        (merges_alone, "has merges.txt, and no vocab.json; both would be right"),
        (vocabulary_alone, "has vocab.json, and no merges.txt; both"),
        (other_merges, "merges.txt:2: merges no two tokens of vocab.json to a third"),
        (words, "is no vocabulary of bytes as GPT-2's"),
        (twice, "'ab' and 'abc' have one number; two would be right"),
        (of_class("XLMRobertaTokenizer"), "how 'XLMRobertaTokenizer' reads it is not known; a tok"),
        (fast_with(eos_token="<none>"), "has no token '<none>'"),
        (fast_with(eos_token=7), "eos_token of tokenizer_config.json is '7'; a string, or an obj"),
        (
            fast_with(added_tokens_decoder={"5": {"content": "<|x|>"}}),
            r"'<\|x\|>' has the number 5 in the files beside it, and here '\$' has it; the fil",
        ),
        (
            fast_with(added_tokens_decoder={"5": {"content": "<|end|>"}}),
            r"'<\|end\|>' has the number 5 in the files beside it, and here it is 1; the files of",
        ),
        (fast_with(added_tokens_decoder={"x": {"content": "a"}}), "'x' in added_tokens_decoder is"),
        (
            fast_with(added_tokens_decoder={"999999999": {"content": "<|x|>"}}),
            "has the number 999,999,999; at most 16,777,215 would be right",
        ),
        (lambda folder: write(folder, tokenizer="{}"), "not a tokenizer.json"),
        (lambda folder: write(folder, tokenizer="{}", tokenizer_config="["), "not valid JSON"),
    ],
)
def test_folders_that_are_refused_in_one_line(make, message, tmp_path):
    make(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)
