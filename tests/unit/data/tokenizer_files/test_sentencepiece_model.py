import pytest
from support.tokenizer_files import (
    BPE,
    BYTE_PIECES,
    CONTROL,
    LETTERS,
    NORMAL,
    PIECES,
    SPECIAL_PIECES,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORD,
    WORDS,
    charsmap,
    field,
    sentencepiece_model,
)

from geojax.data import Tokenizer
from geojax.data.tokenizer_files.protobuf import DamagedMessageError
from geojax.data.tokenizer_files.sentencepiece_model import parse_model
from geojax.errors import UserError


def load(folder, content):
    path = folder / "m.model"
    path.write_bytes(content)
    return Tokenizer.load(path)


def tokens(tokenizer, text):
    names = {number: token for token, number in tokenizer._backend.get_vocab().items()}
    return " ".join(names[number] for number in tokenizer.encode(text))


@pytest.mark.parametrize(
    ("pieces", "training", "normalizer", "text", "expected"),
    [
        (PIECES, {}, {}, "abcd ab", "▁ab cd ▁ab"),
        (PIECES, {}, {}, "", ""),
        (PIECES, {}, {}, " a  b", "▁ ▁ a ▁ ▁ b"),
        (PIECES, {}, {4: 1}, " a  b ▁ ", "▁ a ▁ b"),
        (PIECES, {}, {3: 0}, "abcd", "abcd"),
        (PIECES, {}, {}, "aéẞb", "▁ a <unk> b"),
        (PIECES, {}, {}, "<s>", "▁ < s >"),
        ([*PIECES, *BYTE_PIECES], {35: 1}, {}, "aé", "▁ a <0xC3> <0xA9>"),
        ([*PIECES, ("bc", 0.0, USER_DEFINED)], {}, {}, "abcd bc", "▁ a bc d ▁ bc"),
        ([*PIECES, ("▁▁", 0.0, USER_DEFINED)], {}, {3: 0}, "a  a   b", "a ▁▁ a ▁▁ ▁ b"),
        (PIECES, {3: UNIGRAM}, {}, "abcd ab", "▁ab cd ▁ab"),
        (PIECES, {3: UNIGRAM}, {}, "aéẞb", "▁ a <unk> b"),
        (PIECES, {3: UNIGRAM}, {}, "<s></s>", "▁ < s > < / s >"),
        ([*PIECES, *BYTE_PIECES], {3: UNIGRAM, 35: 1}, {}, "<0x61>é", None),
        ([*PIECES, ("bc", 0.0, USER_DEFINED)], {3: UNIGRAM}, {}, "a bcd", "▁ a ▁ bc d"),
        ([*PIECES, ("▁abc", 9.0, UNUSED)], {3: UNIGRAM}, {}, "abc", "▁ab c"),
    ],
)
def test_a_text_has_the_models_pieces(pieces, training, normalizer, text, expected, tmp_path):
    tokenizer = load(tmp_path, sentencepiece_model(pieces, training, normalizer))
    if expected is None:
        x, unknown = tokenizer.id_of("<0x78>"), [tokenizer.id_of(f"<0x{n}>") for n in ("C3", "A9")]
        assert x in tokenizer.encode(text)
        assert tokenizer.encode(text)[-2:] == unknown
        assert tokenizer.id_of("<0x61>") not in tokenizer.encode(text)
    else:
        assert tokens(tokenizer, text) == expected
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


def test_pieces_that_no_text_holds_stay_out_of_texts_with_unknown_characters(tmp_path):
    """`<` is no piece, and the library gives an unknown character a worse score than any piece."""
    letters = [piece for piece in LETTERS if piece[0] not in "<>/"]
    content = sentencepiece_model([*SPECIAL_PIECES, *letters], {3: UNIGRAM})
    assert tokens(load(tmp_path, content), "a<s>b</s>") == "▁ a <unk> s <unk> b <unk> s <unk>"


def test_decoding_has_the_text_without_the_first_blank(tmp_path):
    tokenizer = load(tmp_path, sentencepiece_model())
    assert tokenizer.decode([1, *tokenizer.encode("ab cd"), 2]) == "ab cd"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"
    assert tokenizer.decode(tokenizer.encode("aéb")) == "a \N{DOUBLE QUESTION MARK} b"
    before, behind = tokenizer.encode("cd"), tokenizer.encode("ab")
    assert tokenizer.decode(behind) == "ab"
    assert tokenizer.decode_behind(before, behind) == " ab"


def test_a_model_without_a_beginning_ends_documents_alone(tmp_path):
    pieces = [piece for piece in PIECES if piece[0] != "<s>"]
    tokenizer = load(tmp_path, sentencepiece_model(pieces, {41: 2**64 - 1}))
    assert tokenizer.beginning == tokenizer.end == "</s>"
    renamed = [("<end>", 0.0, CONTROL) if piece[0] == "</s>" else piece for piece in pieces]
    assert load(tmp_path, sentencepiece_model(renamed, {47: "<end>"})).end == "<end>"


def test_equal_models_give_equal_bytes(tmp_path):
    contents = [load(tmp_path, sentencepiece_model()).fingerprint for _ in range(2)]
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (sentencepiece_model()[:-3], r"no whole model of SentencePiece \(it ends within a"),
        (sentencepiece_model()[:60], r"no whole model of SentencePiece \(it ends"),
        (sentencepiece_model(training={3: WORD}), "is a word model of SentencePiece"),
        (sentencepiece_model(training={24: 1}), "writes blanks otherwise"),
        (sentencepiece_model(normalizer={5: 0}), "writes blanks otherwise"),
        (sentencepiece_model(denormalizer={2: b"x"}), "changes a decoded text"),
        (sentencepiece_model([*PIECES, WORDS[0]]), "has the piece 'ab' twice"),
        (sentencepiece_model([*PIECES, ("", 0.0, NORMAL)]), "has an empty piece"),
        (sentencepiece_model(PIECES[1:]), "has not exactly one unknown piece"),
        (sentencepiece_model([*PIECES, ("u", 0.0, UNKNOWN)]), "not exactly one unknown"),
        (sentencepiece_model(SPECIAL_PIECES), "has no piece for a text"),
        (sentencepiece_model([*PIECES, *BYTE_PIECES[1:]], {35: 1}), "other bytes than all 256"),
        (sentencepiece_model([*PIECES, ("x" * 2000, 0.0, NORMAL)]), "of 2,000 characters"),
        (sentencepiece_model([*PIECES, ("§", 0.0, CONTROL)]), "the single character '§'"),
        (sentencepiece_model([*PIECES, ("a b", 0.0, USER_DEFINED)]), "which holds a blank"),
        (sentencepiece_model([*PIECES, ("ac", 0.0, UNUSED)]), "has the unused piece 'ac'"),
        (sentencepiece_model([*PIECES, ("xa", -5.0, NORMAL)]), "'xa', but none for 'x' alone"),
        (
            sentencepiece_model([*PIECES, ("xa", -5.0, NORMAL)], {3: UNIGRAM}),
            "'xa', but none for 'x' alone",
        ),
        (
            sentencepiece_model([*PIECES, ("bc", -3.0, NORMAL)]),
            "one score, -3.0, for 'cd' and 'bc'",
        ),
        (sentencepiece_model([*PIECES, ("x", float("nan"), NORMAL)]), "has the score nan"),
        (sentencepiece_model([*PIECES, ("x", 0.0, 77)]), "a piece has the unknown type 77"),
        (
            sentencepiece_model([*PIECES, ("§§", 0.0, CONTROL)], {3: UNIGRAM}),
            "'§§', which no text holds, of unknown characters alone",
        ),
        (
            sentencepiece_model([*PIECES, ("a▁", 0.0, USER_DEFINED)], {}, {4: 1}),
            "at whose end extra blanks are removed",
        ),
        (
            sentencepiece_model(
                [*PIECES, ("ax", 0.0, USER_DEFINED)], {}, {2: charsmap({"x": "y"})}
            ),
            "'ax', which its normalizer would change",
        ),
        (sentencepiece_model(normalizer={2: b"\1\2\3"}), "the table of its normalizer is damaged"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_cannot_be_expressed_is_refused_in_one_line(content, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        load(tmp_path, content)
    assert str(error.value).startswith(str(tmp_path / "m.model"))
    assert "\n" not in str(error.value)


def test_every_cut_of_a_model_is_no_model():
    content = sentencepiece_model()
    for size in range(len(content)):
        with pytest.raises(DamagedMessageError):
            parse_model(content[:size])


def test_a_group_is_no_field():
    with pytest.raises(DamagedMessageError, match="unknown type 3"):
        parse_model(field(1, b"")[:0] + b"\x0b")


def test_bpe_is_the_default_of_these_files():
    assert parse_model(sentencepiece_model()).type == "bpe"
    assert parse_model(sentencepiece_model(training={3: BPE})).pieces[3].text == "ab"
