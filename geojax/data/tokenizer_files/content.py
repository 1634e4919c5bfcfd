"""The content of a `tokenizer.json` that is made of other files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SHOWN_CHARACTERS = 40
"""Most characters of a token that a message shows."""


class TokenizerContent(NamedTuple):
    """A `tokenizer.json`, and the tokens that begin and end a document as its files name them."""

    json: bytes
    beginning: str | None = None
    end: str | None = None


class AddedToken(NamedTuple):
    """A token that is found before the model reads a text."""

    content: str
    special: bool = True
    """Spelled in a plain text it is plain text."""
    normalized: bool = False
    """It is looked for in the normalized text."""
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def tokenizer_json(
    model: Mapping[str, Any],
    added: Mapping[int, AddedToken],
    *,
    normalizers: Sequence[Mapping[str, Any]] = (),
    pre_tokenizers: Sequence[Mapping[str, Any]] = (),
    decoders: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """Write the parts of a tokenizer as the `tokenizers` library reads them.

    Args:
        model: the model; its vocabulary holds the added tokens too, which keep their numbers so.
        added: added tokens by number.
        normalizers: steps that change a text.
        pre_tokenizers: steps that split it.
        decoders: steps that make a text of tokens.
    """
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, **token._asdict()} for number, token in sorted(added.items())
        ],
        "normalizer": _sequence(normalizers, "normalizers"),
        "pre_tokenizer": _sequence(pre_tokenizers, "pretokenizers"),
        "post_processor": None,
        "decoder": _sequence(decoders, "decoders"),
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    """Return the step that makes a piece of every match of a pattern, or splits behind it."""
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": behavior,
        "invert": False,
    }


def replace(pattern: str, content: str, *, regex: bool = False) -> dict[str, Any]:
    """Return the step that writes `content` for every match of a text or a pattern."""
    return {
        "type": "Replace",
        "pattern": {"Regex" if regex else "String": pattern},
        "content": content,
    }


def byte_level(*, add_prefix_space: bool, use_regex: bool) -> dict[str, Any]:
    """Return the step that writes each byte as a character, and its inverse."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def any_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches each of `texts`, the longest first."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return "|".join("".join(map(character_code, text)) for text in ordered)


def character_code(character: str) -> str:
    """Return the pattern of one character."""
    return f"\\x{{{ord(character):X}}}"


def shown(token: str | bytes) -> str:
    """Return a token for a message: printable, and cut off where it is long."""
    text = repr(token[:SHOWN_CHARACTERS])
    return text if isinstance(token, str) else text[1:]


def _sequence(steps: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any] | None:
    if len(steps) == 1:
        return steps[0]
    return {"type": "Sequence", key: list(steps)} if steps else None
