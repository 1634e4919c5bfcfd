# ruff: noqa: RUF001
"""Tokens and texts of every kind of a tokenizer's files, beside those of the kind's own library."""

import collections
import io
import itertools
import json
import random

import pytest
import regex
import sentencepiece
import tiktoken
import tokenizers
import transformers
from tiktoken_ext import openai_public

from geojax.data import Tokenizer
from geojax.data.tokenizer_files.sentencepiece_model import parse_model
from geojax.data.tokenizer_files.tiktoken_ranks import ENCODINGS, encoded_json

CORPUS = [
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "The tokens of a text are numbered; don't count them, we'll do it. They're 12345 or 3.14159.",
    "    if x == [1, 2, 3]:\n\t\treturn {'a': x}  # aaaaaaaa bababa ======= ------",
    "これは日本語の文章です。中文文本，测试。 안녕하세요 세계",
    "Ünïcödé naïve café résumé Ελληνικά Кириллица עברית العربية 😀😃👍🏽",
    "abc abcab abcabcab aab abab baa the theory of the thing, and the other thing",
] * 20
ATOMS = (
    *("a", "b", "ab", "the", "thing", "don't", "We'LL", " of", "Straße", "x", "1", "12", "12345"),
    *(" ", "  ", "     ", "\n", "\n\n", "\r\n", "\t", "\v", "\u00a0", "\u3000", "\u2028", "\x85"),
    *("=", "==", "-", "---", "'s", "'ſ", "/", "(x)", "世", "界", "こ", "안", "😀", "👍🏽", "☃"),
    *(
        "é",
        "e\u0301",
        "e\u0302\u0301",
        "ế",
        "\u0301",
        "\u1112\u1161\u11ab",
        "שּׁ",
        "\u064e\u0651",
        "½",
    ),
    *(
        "ａｂｃ",
        "①",
        "\0",
        "\x01",
        "\x7f",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\ufffd",
        "\U0010fffd",
        "Ж",
    ),
    *(
        "<s>",
        "</s>",
        "<unk>",
        "<pad>",
        "<0x0A>",
        "<|endoftext|>",
        "▁",
        "▁▁",
        "<sym>",
        "[X]",
        "<mask>",
    ),
)


def texts(count=400):
    draw = random.Random(7)
    made = [
        "",
        " ",
        "\n",
        "the thing",
        " the thing",
        "the thing ",
        *CORPUS[:6],
        " ".join(CORPUS[:6]),
    ]
    for _ in range(count):
        made.append("".join(draw.choice(ATOMS) for _ in range(draw.randrange(1, 25))))
        made.append("".join(draw.choice("ab=- ") for _ in range(draw.randrange(30))))
        made.append(" ".join(draw.choice(CORPUS)[draw.randrange(9) :] for _ in range(3)))
    return made


TEXTS = texts()


def trained_ranks(pattern, count=400):
    """Bytes, and the merges of the most frequent pairs of neighbors within the pattern's pieces."""
    pieces = collections.Counter(regex.findall(pattern, "\n".join(CORPUS)))
    words = [([bytes([byte]) for byte in piece.encode()], count) for piece, count in pieces.items()]
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < count:
        pairs = collections.Counter()
        for word, times in words:
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[left + right] = len(ranks)
        for word, _ in words:
            place = 0
            while place + 1 < len(word):
                if word[place : place + 2] == [left, right]:
                    word[place : place + 2] = [left + right]
                place += 1
    return ranks


@pytest.fixture(scope="module")
def patterns():
    """The pattern of each encoding, as its own library has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *files, **hashes: {})
        found = {
            name: openai_public.ENCODING_CONSTRUCTORS[name]()["pat_str"]
            for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base")
        }
    # Meta and Qwen publish theirs in programs; both are in the tokenizer.json of their models.
    return {**found, "llama3": ENCODINGS["llama3"].pattern, "qwen": ENCODINGS["qwen"].pattern}


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_tiktoken_file_has_the_tokens_of_tiktoken(name, patterns):
    ranks = trained_ranks(patterns[name])
    special = {"<|endoftext|>": 500}
    theirs = tiktoken.Encoding(
        name, pat_str=patterns[name], mergeable_ranks=ranks, special_tokens=special
    )
    content = encoded_json(ranks, ENCODINGS[name]._replace(special=special))
    ours = Tokenizer(content, source=name)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode_ordinary(text), ascii(text)
        assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_id, ours.eos_id) == (500, 500)


def test_tiktoken_splits_every_character_alike(patterns):
    """Every third of Unicode's characters, beside letters, digits and blanks."""
    characters = [chr(code) for code in range(0, 0x110000, 3) if not 0xD800 <= code < 0xE000]
    for name in ("cl100k_base", "o200k_base"):
        ranks = {bytes([byte]): byte for byte in range(256)}
        ranks.update(
            (pair, 256 + n) for n, pair in enumerate((b" a", b"b ", b"1 ", b"  ", b"\n\n"))
        )
        theirs = tiktoken.Encoding(
            name, pat_str=patterns[name], mergeable_ranks=ranks, special_tokens={}
        )
        special = {"<|endoftext|>": 500}
        ours = Tokenizer(encoded_json(ranks, ENCODINGS[name]._replace(special=special)), source="x")
        for first in range(0, len(characters), 256):
            text = "".join(f"a{c}b {c}1 {c}{c}\n" for c in characters[first : first + 256])
            assert ours.encode(text) == theirs.encode_ordinary(text), hex(ord(text[1]))


def trained_model(**settings):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=500,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()


SYMBOLS = ["<sym>", "[X]", "ab", "<mask>"]
# An accent behind a symbol or behind a character that the normalizer removes, and a text that is
# such a character or a symbol alone: docs/data.md has them.
CORNERS = regex.compile(
    r"(?:[\p{Cc}\p{Cf}\p{Cn}]|<sym>|\[X\]|ab|<mask>)\p{M}|^\s*(?:[\x00\x01\x7f]+|<sym>|\[X\]|ab|<mask>)\s*$"
)
MODELS = {
    "default": {},
    "bytes": {"byte_fallback": True},
    "symbols": {"byte_fallback": True, "user_defined_symbols": SYMBOLS},
    "identity": {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "no prefix": {"add_dummy_prefix": False, "control_symbols": ["<pad>"]},
    "runs of blanks": {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["▁▁", "▁▁▁", "\n", "<sym>"],
    },
    "across words": {"split_by_whitespace": False, "normalization_rule_name": "nfkc"},
    "case": {"normalization_rule_name": "nmt_nfkc_cf", "bos_id": -1},
}


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sentencepiece_model_has_the_tokens_of_sentencepiece(kind, name, tmp_path):
    content = trained_model(model_type=kind, **MODELS[name])
    path = tmp_path / "some.model"
    path.write_bytes(content)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    ours = Tokenizer.load(path)
    scores = [piece.score for piece in parse_model(content).pieces]
    ties = 0
    for text in TEXTS:
        if CORNERS.search(text):
            continue
        ids, right = ours.encode(text), theirs.encode(text)
        if kind == "unigram" and ids != right:
            # sentencepiece rounds the sums of scores to float32.
            sums = [sum(map(scores.__getitem__, tokens)) for tokens in (ids, right)]
            assert sums[0] == pytest.approx(sums[1], abs=1e-3), ascii(text)
            ties += 1
        else:
            assert ids == right, ascii(text)
        assert ours.decode(ids) == theirs.decode(right), ascii(text)
    assert ties < len(TEXTS) / 50
    assert ours.eos_id == theirs.eos_id()
    assert ours.bos_id == (theirs.bos_id() if theirs.bos_id() >= 0 else theirs.eos_id())
    assert ours.vocabulary_size == len(theirs)


def same_as_transformers(folder, texts=TEXTS):
    theirs = transformers.AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    ours = Tokenizer.load(folder)
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), ascii(text)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    return ours, theirs


def byte_level(vocabulary_size=400):
    backend = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    backend.train_from_iterator(
        CORPUS, vocabulary_size, show_progress=False, special_tokens=["<|endoftext|>"]
    )
    return backend


def test_a_fast_folder_has_the_tokens_of_transformers(tmp_path):
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level()._tokenizer, eos_token="<|endoftext|>", bos_token=None
    )
    fast.add_tokens(["<|extra|>", "abab"])
    fast.save_pretrained(tmp_path)
    ours, _ = same_as_transformers(tmp_path)
    assert ours.bos_id == ours.eos_id == 0
    assert (
        ours.fingerprint
        == Tokenizer.load(tmp_path / "tokenizer.json", end="<|endoftext|>").fingerprint
    )


def test_tokens_that_only_the_config_of_a_fast_folder_has(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            "400": {"content": "<|im_start|>", "special": True},
            "401": {"content": "<|im_end|>", "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = same_as_transformers(tmp_path)
    assert ours.eos_id == theirs.eos_token_id == 401


@pytest.mark.parametrize(
    "config", [None, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}]
)
def test_a_folder_of_gpt2s_kind_has_the_tokens_of_transformers(tmp_path, config):
    byte_level().save_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = same_as_transformers(tmp_path)
    assert ours.bos_id == ours.eos_id == theirs.eos_token_id == 0


def test_a_folder_of_qwens_kind_has_the_tokens_of_transformers(tmp_path):
    byte_level().save_model(str(tmp_path))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            "0": {"content": "<|endoftext|>", "special": True},
            "400": {"content": "<|im_end|>", "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, _ = same_as_transformers(tmp_path)
    assert ours.bos_id == ours.eos_id == 400


def test_a_folder_of_llama2s_kind_has_the_tokens_of_transformers(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(
        trained_model(model_type="bpe", **MODELS["identity"])
    )
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    # sentencepiece writes a blank before a first blank, and transformers 5 does not.
    texts = [text for text in TEXTS if not text.startswith((" ", "▁"))]
    ours, theirs = same_as_transformers(tmp_path, texts)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
