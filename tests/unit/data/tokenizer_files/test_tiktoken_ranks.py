import json
from pathlib import Path

import pytest
from support.tokenizer_files import ranks

from geojax.data import Tokenizer
from geojax.data.tokenizer_files import tiktoken_ranks
from geojax.data.tokenizer_files.tiktoken_ranks import ENCODINGS, encoded_json, parse_ranks
from geojax.errors import UserError


@pytest.fixture
def small(monkeypatch):
    """An encoding of 258 ranks beside the known ones."""
    small = ENCODINGS["cl100k_base"]._replace(ranks=258, special={"<|endoftext|>": 300})
    monkeypatch.setitem(tiktoken_ranks.ENCODINGS, "small", small)


def test_the_number_of_ranks_tells_the_encoding(small, tmp_path):
    path = tmp_path / "renamed.model"
    path.write_bytes(ranks())
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("ab ab<|endoftext|>")[:3] == [256, ord(" "), 256]
    assert 300 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.bos_id == tokenizer.eos_id == 300
    assert tokenizer.decode(tokenizer.encode("öne\r\n two 🙂")) == "öne\r\n two 🙂"
    assert Tokenizer.load(path).fingerprint == tokenizer.fingerprint


def test_llama3_has_256_special_tokens_behind_its_ranks():
    special = ENCODINGS["llama3"].special
    assert sorted(special.values()) == list(range(128_000, 128_256))
    assert special["<|eot_id|>"] == 128_009
    assert special["<|reserved_special_token_247|>"] == 128_255


@pytest.mark.parametrize("name", ENCODINGS)
def test_special_tokens_fit_the_ranks(name):
    """A rank that is a special token's is left out, as in p50k_base."""
    encoding = ENCODINGS[name]
    assert {encoding.beginning, encoding.end} <= encoding.special.keys()
    within = [number for number in encoding.special.values() if number < encoding.ranks]
    assert within == ([50_256] if name == "p50k_base" else [])


def test_pairs_of_a_token_are_all_merged():
    """Either way to make `abc` of two tokens is a merge."""
    table = parse_ranks(Path("x"), ranks([b"ab", b"bc", b"abc"]))
    merges = json.loads(encoded_json(table, ENCODINGS["r50k_base"]))["model"]["merges"]
    assert merges == [["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ranks(), r"258 ranks of tiktoken, .*known by number of ranks are r50k_base \(50,256\)"),
        (ranks() + b"YWI= 999\n", r"x:259: has the token 'ab' of line 257 again"),
        (ranks() + b"YWJj 7\n", r"x:259: has the rank 7 of line 8 again"),
        (ranks() + b"YWJj\n", r"x:259: no token of tiktoken; base64 of 1 to 1,024 bytes"),
        (ranks() + b"YW=Jj 9\n", "x:259: no token"),
        (ranks() + b"YWJjZ 900\n", "x:259: no token"),
        (ranks() + b"YWJj 99999999999\n", "x:259: no token"),
        (ranks().split(b"\n", 1)[1], "x: has no token for the byte 0x00; all 256 would be right"),
    ],
)
def test_damaged_files_are_refused_in_one_line(content, message, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        Tokenizer.load(path)
    assert "\n" not in str(error.value)


def test_a_known_name_with_another_number_of_ranks_is_no_whole_file(tmp_path):
    path = tmp_path / "cl100k_base.tiktoken"
    path.write_bytes(ranks())
    with pytest.raises(UserError, match="has 258 ranks, and cl100k_base has 100,256"):
        Tokenizer.load(path)


def test_ranks_of_special_tokens_and_huge_ranks_are_refused(small, tmp_path):
    path = tmp_path / "x"
    for rank in (300, 4_000_000_000):
        path.write_bytes(ranks().replace(b" 257\n", b" %d\n" % rank))
        with pytest.raises(UserError, match=rf"' a' has the rank {rank:,}, .* 0 to 257 would be"):
            Tokenizer.load(path)
