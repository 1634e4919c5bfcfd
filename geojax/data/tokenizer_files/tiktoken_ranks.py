"""Files of tiktoken: a line has a token's bytes in base64, and its rank, which is its number.

The pattern that splits a text and the special tokens are not in the file. Both follow from the
encoding, which is known by its number of ranks.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from geojax.data.tokenizer_files.content import (
    AddedToken,
    TokenizerContent,
    byte_level,
    shown,
    split,
    tokenizer_json,
)
from geojax.data.tokenizer_files.merges import LONGEST_PIECE, pairs_in_order
from geojax.errors import UserError

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,10})")
_BYTES = 256


class Encoding(NamedTuple):
    """The parts of an encoding that its file lacks."""

    ranks: int
    """Number of ranks in the file."""
    pattern: str
    """Pattern of the pieces into which a text is split before anything is merged."""
    special: Mapping[str, int]
    """Numbers of the special tokens."""
    beginning: str = "<|endoftext|>"
    """Token that begins a document."""
    end: str = "<|endoftext|>"
    """Token that ends a document."""


# The endings of "I'm", "you'll" and so on, then words, numbers, marks and blanks. tiktoken writes
# some with possessive quantifiers, which the library's regular expressions read as something else.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+\z|\s+(?!\S)|\s"
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
)
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
"""Pattern of Qwen's encodings, whose numbers are split into digits."""
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Meta numbers the reserved ones on; the names are those since Llama 3.1.
_LLAMA3_NAMES = [
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *("<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"),
    *("<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    *("<|eot_id|>", "<|python_tag|>"),
]
_LLAMA3_NAMES += [f"<|reserved_special_token_{n}|>" for n in range(3, 3 + 256 - len(_LLAMA3_NAMES))]
_QWEN_NAMES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN_NAMES += [f"<|extra_{n}|>" for n in range(205)]

ENCODINGS = {
    "r50k_base": Encoding(50_256, _GPT2_PATTERN, {"<|endoftext|>": 50_256}),
    "p50k_base": Encoding(50_280, _GPT2_PATTERN, {"<|endoftext|>": 50_256}),
    "cl100k_base": Encoding(
        100_256,
        _CL100K_PATTERN,
        {
            "<|endoftext|>": 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
    ),
    "o200k_base": Encoding(
        199_998, _O200K_PATTERN, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}
    ),
    "llama3": Encoding(
        128_000,
        _LLAMA3_PATTERN,
        {name: 128_000 + number for number, name in enumerate(_LLAMA3_NAMES)},
        beginning="<|begin_of_text|>",
        end="<|end_of_text|>",
    ),
    "qwen": Encoding(
        151_643,
        QWEN_PATTERN,
        {name: 151_643 + number for number, name in enumerate(_QWEN_NAMES)},
    ),
}
"""Encodings by name, which a file's name begins with."""


def is_ranks(content: bytes) -> bool:
    """Return True if `content` begins as a file of tiktoken does."""
    return _LINE.fullmatch(content[: 4 * LONGEST_PIECE].split(b"\n", 1)[0].rstrip()) is not None


def read_ranks(path: Path, content: bytes) -> TokenizerContent:
    """Turn the file of a known encoding into a `tokenizer.json`.

    Args:
        path: name of the file.
        content: its bytes.

    Raises:
        UserError: a line is no token and rank, or the encoding is not known.
    """
    ranks = parse_ranks(path, content)
    encoding = _encoding(path, ranks)
    return TokenizerContent(encoded_json(ranks, encoding), encoding.beginning, encoding.end)


def parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Return the rank of each token.

    Raises:
        UserError: a line is no token and rank, two are equal, or a byte has none.
    """
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        parts = _LINE.fullmatch(line.rstrip())
        try:
            token = base64.b64decode(parts[1], validate=True) if parts else b""
        except binascii.Error:
            token = b""
        if parts is None or not 0 < len(token) <= LONGEST_PIECE:
            raise UserError(
                f"{path}:{number}: no token of tiktoken; base64 of 1 to {LONGEST_PIECE:,} bytes, a "
                "blank and its rank would be right"
            )
        rank = int(parts[2])
        if rank in lines:
            raise UserError(f"{path}:{number}: has the rank {rank:,} of line {lines[rank]:,} again")
        if token in ranks:
            raise UserError(
                f"{path}:{number}: has the token {shown(token)} of line {lines[ranks[token]]:,} "
                "again"
            )
        ranks[token], lines[rank] = rank, number
    missing = [byte for byte in range(_BYTES) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(
            f"{path}: has no token for the byte {missing[0]:#04x}; all {_BYTES} would be right"
        )
    return ranks


def _encoding(path: Path, ranks: Mapping[bytes, int]) -> Encoding:
    of_name = next((name for name in ENCODINGS if path.name.startswith(name)), None)
    of_number = next((name for name in ENCODINGS if ENCODINGS[name].ranks == len(ranks)), None)
    if of_name is not None and of_name != of_number:
        raise UserError(
            f"{path}: has {len(ranks):,} ranks, and {of_name} has {ENCODINGS[of_name].ranks:,}; "
            "the whole file would be right"
        )
    if of_number is None:
        known = ", ".join(f"{name} ({each.ranks:,})" for name, each in ENCODINGS.items())
        raise UserError(
            f"{path}: {len(ranks):,} ranks of tiktoken, whose pattern and special tokens are in no "
            f"file; known by number of ranks are {known}, and a tokenizer.json would do for another"
        )
    encoding = ENCODINGS[of_number]
    taken = set(encoding.special.values())
    largest = len(ranks) - 1 + sum(number < len(ranks) for number in taken)
    for token, rank in ranks.items():
        if rank > largest or rank in taken:
            raise UserError(
                f"{path}: {shown(token)} has the rank {rank:,}, which {of_number} does not; 0 to "
                f"{largest:,} would be right"
            )
    return encoding


def encoded_json(ranks: Mapping[bytes, int], encoding: Encoding) -> bytes:
    """Write the `tokenizer.json` of an encoding."""
    characters = _characters()

    def text(token: bytes) -> str:
        return "".join(map(characters.__getitem__, token))

    ordered = sorted(ranks, key=ranks.__getitem__)
    merges = pairs_in_order((token for token in ordered if len(token) > 1), ranks)
    model = {
        "type": "BPE",
        # A piece of the text that is a token needs no merges.
        "ignore_merges": True,
        "vocab": {**{text(token): ranks[token] for token in ordered}, **encoding.special},
        "merges": [[text(left), text(right)] for left, right in merges],
    }
    step = byte_level(add_prefix_space=False, use_regex=False)
    return tokenizer_json(
        model,
        {number: AddedToken(name) for name, number in encoding.special.items()},
        pre_tokenizers=[split(encoding.pattern), step],
        decoders=[step],
    )


def _characters() -> list[str]:
    """Return the character that stands for each byte: itself, or one from 256 on for blanks."""
    shown_as_is = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    shown_as_is |= set(range(ord("®"), ord("ÿ") + 1))
    others = iter(range(_BYTES, 2 * _BYTES))
    return [chr(byte if byte in shown_as_is else next(others)) for byte in range(_BYTES)]
