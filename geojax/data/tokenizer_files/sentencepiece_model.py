"""Models of SentencePiece: unigrams (Kudo 2018) and byte-pair encodings.

A model is a message of protocol buffers: pieces, the settings of its training, and the rules by
which it normalizes a text. `▁` stands for a blank.

Two encoders agree but for rounding: SentencePiece sums the scores of unigrams in float32, the
`tokenizers` library in float64. Where two ways to split a text have the same score, the rounding of
the former decides.
"""

import collections
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from geojax.data.tokenizer_files.charsmap import normalizers_of
from geojax.data.tokenizer_files.content import (
    AddedToken,
    TokenizerContent,
    any_of,
    replace,
    shown,
    split,
    tokenizer_json,
)
from geojax.data.tokenizer_files.merges import LONGEST_PIECE, pairs_in_order
from geojax.data.tokenizer_files.protobuf import DamagedMessageError, fields
from geojax.errors import UserError

BLANK = "▁"
_SYMBOL_BONUS = 0.1
"""Score of a user-defined symbol, for each of its bytes but the first."""
_UNKNOWN_MARK = "\ufffe"
"""Character that no text holds, for an unknown one until the blanks before it are removed."""
_MOST_BLANKS = 1 << 16
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


class PieceType(enum.IntEnum):
    """Types of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SentencePiece(NamedTuple):
    """A piece of a model; its place is its number."""

    text: str
    score: float
    type: PieceType

    @property
    def is_in_text(self) -> bool:
        """True if a text may hold the piece."""
        return self.type in (PieceType.NORMAL, PieceType.USER_DEFINED)


class SentencePieceModel(NamedTuple):
    """All of a model that its encoder and decoder read."""

    pieces: Sequence[SentencePiece]
    type: str
    byte_fallback: bool
    """An unknown character is written as its bytes."""
    blank_at_end: bool
    """A blank belongs to the word before it."""
    beginning: str
    end: str
    unknown_text: str
    """Text that the decoder writes for an unknown character."""
    charsmap: bytes
    add_dummy_prefix: bool
    """A text begins with a blank."""
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    changes_decoded: bool
    """The decoder normalizes as well."""

    def type_of(self, number: int) -> PieceType | None:
        """Return the type of a piece; None: the model has no such number."""
        return self.pieces[number].type if number < len(self.pieces) else None


def is_model(content: bytes) -> bool:
    """Return True if `content` begins as a model does: with a piece, which has a text."""
    try:
        first = next(fields(content[: 4 * LONGEST_PIECE]))
        return first.number == 1 and next(fields(first.bytes)).number == 1
    except (DamagedMessageError, StopIteration):
        return False


def read_model(
    path: Path, content: bytes, added: Mapping[int, AddedToken] | None = None
) -> TokenizerContent:
    """Turn a model into a `tokenizer.json`.

    Args:
        path: name of the file.
        content: its bytes.
        added: tokens that other files name, by number. A special one may be a piece of the model,
            which then stands in no text.

    Raises:
        UserError: the file is damaged, or the model has a part that a `tokenizer.json` cannot
            express.
    """
    try:
        model = parse_model(content)
    except DamagedMessageError as error:
        raise UserError(
            f"{path}: no whole model of SentencePiece ({error}); fetch the file again"
        ) from None
    extra = _refuse_other_numbers(path, model, added or {})
    model = model._replace(
        pieces=[
            piece._replace(type=PieceType.CONTROL)
            if piece.is_in_text and number in extra and extra[number].special
            else piece
            for number, piece in enumerate(model.pieces)
        ]
    )
    _refuse_unlike(path, model)
    controls = {piece.text for piece in model.pieces if piece.type == PieceType.CONTROL}
    beginning, end = (name if name in controls else None for name in (model.beginning, model.end))
    return TokenizerContent(_content(path, model, extra), beginning, end)


def parse_model(content: bytes) -> SentencePieceModel:
    """Read the message.

    Raises:
        DamagedMessageError: it is damaged.
    """
    pieces: list[SentencePiece] = []
    training: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    denormalizer: dict[int, Any] = {}
    seen: set[int] = set()
    for field in fields(content):
        seen.add(field.number)
        if field.number == 1:
            pieces.append(_piece(field.bytes))
        elif field.number in (2, 3, 5):
            settings = {2: training, 3: normalizer, 5: denormalizer}[field.number]
            settings.update((inner.number, inner) for inner in fields(field.bytes))
    if not seen >= {2, 3}:
        raise DamagedMessageError("it ends before its settings")

    def flag(settings: dict[int, Any], number: int, default: bool) -> bool:
        return bool(settings[number].integer) if number in settings else default

    def text(number: int, default: str) -> str:
        return training[number].text if number in training else default

    number = training[3].integer if 3 in training else 1
    return SentencePieceModel(
        pieces,
        _MODEL_TYPES.get(number, str(number)),
        byte_fallback=flag(training, 35, False),
        blank_at_end=flag(training, 24, False),
        beginning=text(46, "<s>"),
        end=text(47, "</s>"),
        unknown_text=text(44, " \N{DOUBLE QUESTION MARK} "),
        charsmap=normalizer[2].bytes if 2 in normalizer else b"",
        add_dummy_prefix=flag(normalizer, 3, True),
        remove_extra_whitespaces=flag(normalizer, 4, True),
        escape_whitespaces=flag(normalizer, 5, True),
        changes_decoded=2 in denormalizer and denormalizer[2].bytes != b"",
    )


def _piece(message: bytes) -> SentencePiece:
    text, score, kind = "", 0.0, PieceType.NORMAL
    for field in fields(message):
        if field.number == 1:
            text = field.text
        elif field.number == 2:
            score = field.float
        elif field.number == 3:
            try:
                kind = PieceType(field.integer)
            except ValueError:
                raise DamagedMessageError(f"a piece has the unknown type {field.integer}") from None
    if not math.isfinite(score):
        raise DamagedMessageError(f"the piece {shown(text)} has the score {score}")
    return SentencePiece(text, score, kind)


def _refuse_other_numbers(
    path: Path, model: SentencePieceModel, added: Mapping[int, AddedToken]
) -> Mapping[int, AddedToken]:
    """Return `added` without user-defined symbols; further numbers must follow the model's.

    Raises:
        UserError: a number is another piece's, or leaves a gap.
    """
    number_of = {piece.text: number for number, piece in enumerate(model.pieces)}
    number = len(model.pieces)
    for given, token in sorted(added.items()):
        right = number_of.get(token.content, number)
        if given != right:
            raise UserError(
                f"{path}: {shown(token.content)} has the number {given:,} in files beside it; "
                f"{right:,} would be right"
            )
        number += right == number
    return {
        number: token
        for number, token in added.items()
        if token.special or model.type_of(number) != PieceType.USER_DEFINED
    }


def _refuse_unlike(path: Path, model: SentencePieceModel) -> None:
    """Raise a UserError if the model is none, or encodes by rules that a `tokenizer.json` lacks."""

    def refuse(problem: str) -> None:
        raise UserError(f"{path}: {problem}; a tokenizer.json would do")

    if not model.pieces:
        refuse("has no piece")
    if model.type not in ("unigram", "bpe"):
        refuse(f"is a {model.type} model of SentencePiece, not a unigram or bpe model")
    if model.blank_at_end or not model.escape_whitespaces:
        refuse(f"writes blanks otherwise than as {BLANK} before a word")
    if model.changes_decoded:
        refuse("changes a decoded text by rules of its own")
    counts = collections.Counter(piece.text for piece in model.pieces)
    if "" in counts:
        refuse("has an empty piece")
    text, count = counts.most_common(1)[0]
    if count > 1:
        refuse(f"has the piece {shown(text)} twice")
    if sum(piece.type == PieceType.UNKNOWN for piece in model.pieces) != 1:
        refuse("has not exactly one unknown piece")
    if not any(piece.type == PieceType.NORMAL for piece in model.pieces):
        refuse("has no piece for a text")
    codes = {piece.text for piece in model.pieces if piece.type == PieceType.BYTE}
    if codes != ({f"<0x{byte:02X}>" for byte in range(256)} if model.byte_fallback else set()):
        refuse("has pieces for other bytes than all 256")
    for piece in model.pieces:
        if len(piece.text) > LONGEST_PIECE:
            refuse(f"has the piece {shown(piece.text)}..., of {len(piece.text):,} characters")
        if len(piece.text) == 1 and piece.type in (PieceType.CONTROL, PieceType.UNUSED):
            refuse(f"has the single character {shown(piece.text)} as a piece that no text holds")
        if piece.type == PieceType.USER_DEFINED and " " in piece.text:
            refuse(f"has the user-defined symbol {shown(piece.text)}, which holds a blank")


def _content(path: Path, model: SentencePieceModel, extra: Mapping[int, AddedToken]) -> bytes:
    added = {
        number: AddedToken(piece.text)
        for number, piece in enumerate(model.pieces)
        if piece.type == PieceType.CONTROL
    }
    added.update(extra)
    symbols = [piece.text for piece in model.pieces if piece.type == PieceType.USER_DEFINED]
    frozen: list[str] = []
    cuts: list[dict[str, Any]] = []
    if model.type == "unigram":
        described, cuts = _unigram(path, model, extra)
    else:
        described, frozen = _bpe(path, model, extra), symbols
        added.update(
            (number, AddedToken(piece.text, special=False, normalized=True))
            for number, piece in enumerate(model.pieces)
            if piece.type == PieceType.USER_DEFINED
        )
    return tokenizer_json(
        described,
        added,
        normalizers=_normalizers(path, model, symbols, frozen),
        pre_tokenizers=cuts,
        decoders=_decoders(model),
    )


def _unigram(
    path: Path, model: SentencePieceModel, extra: Mapping[int, AddedToken]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Describe the model of unigrams, and the steps that split a text before it is read.

    The library's encoder reads every piece in a text, also those that no text holds. Each of these
    gets a score below that of its characters, so that the characters are taken. A text that spells
    one with an unknown character is split behind that, or before it: no other piece spans both.

    Raises:
        UserError: a character of a piece is no piece, or a piece cannot be kept out of texts.
    """
    normal = [piece for piece in model.pieces if piece.type == PieceType.NORMAL]
    scores = {piece.text: piece.score for piece in normal}
    worst = min(scores.values())
    scores.update(
        (piece.text, float(np.float32(_SYMBOL_BONUS * (len(piece.text.encode()) - 1))))
        for piece in model.pieces
        if piece.type == PieceType.USER_DEFINED
    )
    for piece in normal:
        for character in piece.text:
            if character not in scores:
                raise UserError(
                    f"{path}: has the piece {shown(piece.text)}, but none for {shown(character)} "
                    "alone; a tokenizer.json would do"
                )
    texts = [piece.text for piece in model.pieces]
    texts += [token.content for number, token in sorted(extra.items()) if number >= len(texts)]
    unknown_piece = next(
        number for number, piece in enumerate(model.pieces) if piece.type == PieceType.UNKNOWN
    )
    vocabulary: list[tuple[str, float]] = []
    cuts: list[str] = []
    for text in texts:
        if text in scores:
            vocabulary.append((text, scores[text]))
        elif all(character in scores for character in text):
            below = sum(min(0.0, scores[character]) for character in text) - 1.0
            vocabulary.append((text, below))
        else:
            vocabulary.append((text, worst))
            place = _place_to_cut(text, scores, anywhere=model.byte_fallback)
            if place is not None:
                cuts.append(f"{any_of([text[:place]])}(?={any_of([text[place:]])})")
            elif text != texts[unknown_piece]:  # unknown characters are that piece anyway
                raise UserError(
                    f"{path}: has the piece {shown(text)}, which no text holds, of unknown "
                    "characters alone; a tokenizer.json would do"
                )
    described = {
        "type": "Unigram",
        "unk_id": unknown_piece,
        "vocab": vocabulary,
        "byte_fallback": model.byte_fallback,
    }
    return described, [split("|".join(cuts), "MergedWithPrevious")] if cuts else []


def _place_to_cut(text: str, known: Mapping[str, float], *, anywhere: bool) -> int | None:
    """Return a place between a known and an unknown character, or `anywhere` if there is none."""
    for place in range(1, len(text)):
        if (text[place - 1] in known) != (text[place] in known):
            return place
    return 1 if anywhere and len(text) > 1 else None


def _bpe(path: Path, model: SentencePieceModel, extra: Mapping[int, AddedToken]) -> dict[str, Any]:
    """Describe the byte-pair encoding.

    Raises:
        UserError: two pieces have one score, a character of a piece is no piece, or a piece is
            taken out of use.
    """

    def refuse(problem: str) -> None:
        raise UserError(f"{path}: {problem}; a tokenizer.json would do")

    normal = [piece for piece in model.pieces if piece.type == PieceType.NORMAL]
    vocabulary = {piece.text: number for number, piece in enumerate(model.pieces)}
    vocabulary.update((token.content, number) for number, token in extra.items())
    numbers = {piece.text: vocabulary[piece.text] for piece in normal}
    for piece in model.pieces:
        if piece.type == PieceType.UNUSED:
            refuse(f"has the unused piece {shown(piece.text)}, which is split again when it is met")
    for piece in normal:
        for character in piece.text:
            if character not in numbers:
                refuse(f"has the piece {shown(piece.text)}, but none for {shown(character)} alone")
    made = sorted(
        (piece for piece in normal if len(piece.text) > 1), key=lambda piece: -piece.score
    )
    pairs: list[tuple[str, str]] = []
    last: SentencePiece | None = None
    for piece in made:
        before = len(pairs)
        pairs += pairs_in_order([piece.text], numbers)
        if len(pairs) == before:
            continue
        if last is not None and last.score == piece.score:
            refuse(
                f"has one score, {piece.score}, for {shown(last.text)} and {shown(piece.text)}, so "
                "that their place in a text decides which is merged first"
            )
        last = piece
    unknown_piece = next(piece for piece in model.pieces if piece.type == PieceType.UNKNOWN)
    return {
        "type": "BPE",
        "unk_token": unknown_piece.text,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "vocab": vocabulary,
        "merges": [list(pair) for pair in pairs],
    }


def _normalizers(
    path: Path, model: SentencePieceModel, symbols: Iterable[str], frozen: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the steps from a text to one whose blanks are written as `▁`.

    Args:
        path: name of the file.
        model: the model.
        symbols: its user-defined symbols, which are exempt from the table.
        frozen: those of them that are found in the normalized text before anything else.

    Raises:
        UserError: a step would change a symbol.
    """
    steps = normalizers_of(path, model.charsmap)
    if steps:
        _refuse_changed(path, model, symbols, steps)
    if model.remove_extra_whitespaces:
        steps += [
            replace(r"\A +", "", regex=True),
            replace(r" {2,}", " ", regex=True),
            replace(rf"[ {BLANK}]+\z", "", regex=True),
        ]
        for symbol in frozen:
            if symbol.endswith(BLANK):
                raise UserError(
                    f"{path}: has the user-defined symbol {shown(symbol)}, at whose end extra "
                    "blanks are removed; a tokenizer.json would do"
                )
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": BLANK})
        if frozen:
            # The library looks for a symbol in the form that these steps give to it alone.
            steps.append(replace(rf"\A{BLANK}(?=(?:{any_of(frozen)})\z)", "", regex=True))
    return [*steps, replace(" ", BLANK)]


def _refuse_changed(
    path: Path,
    model: SentencePieceModel,
    symbols: Iterable[str],
    steps: Sequence[Mapping[str, Any]],
) -> None:
    """Raise a UserError if the table would change one of the symbols."""
    content = tokenizer_json({"type": "BPE", "vocab": {}, "merges": []}, {}, normalizers=steps)
    normalizer = tokenizers.Tokenizer.from_buffer(content).normalizer
    for symbol in symbols:
        if normalizer.normalize_str(symbol) != symbol:
            raise UserError(
                f"{path}: has the user-defined symbol {shown(symbol)}, which its normalizer would "
                "change in any other text; a tokenizer.json would do"
            )


def _decoders(model: SentencePieceModel) -> list[dict[str, Any]]:
    unknown_piece = next(piece.text for piece in model.pieces if piece.type == PieceType.UNKNOWN)
    steps = [
        replace(rf"\A(?:{any_of([unknown_piece])})\z", _UNKNOWN_MARK, regex=True),
        replace(BLANK, " "),
    ]
    if model.byte_fallback:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if model.add_dummy_prefix or model.remove_extra_whitespaces:
        most = _MOST_BLANKS if model.remove_extra_whitespaces else 1
        steps.append({"type": "Strip", "content": " ", "start": most, "stop": 0})
    return [*steps, replace(_UNKNOWN_MARK, model.unknown_text)]
