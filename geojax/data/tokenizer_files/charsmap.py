"""The table by which a SentencePiece model normalizes a text, as steps of the `tokenizers` library.

The table rewrites the longest sequence of characters that it knows, from left to right. It is a
trie, a double array of Darts: 32 bits a node. The library's own step (`Precompiled`) takes the
shortest sequence instead, and drops what follows it in a short grapheme: of a letter and two
accents the second accent. It is right for single characters. So the steps here give it characters
alone, and then compose what the table composes, which is what Unicode does (NFC). Separators keep
Unicode from composing and from sorting more than that.
"""

import base64
import itertools
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geojax.data.tokenizer_files.content import character_code, replace, shown
from geojax.errors import UserError

# Characters that are no grapheme of their own behind others.
_EXTENDING = r"\p{M}\x{200C}\x{200D}\x{FF9E}\x{FF9F}\x{1F3FB}-\x{1F3FF}"
_BREAK = rf"(?<=[\s\S])(?=[{_EXTENDING}])|(?<=\r)(?=\n)"
_SEPARATOR = "\N{INTERLINEAR ANNOTATION SEPARATOR}"
_REMOVED = "\x01"
_MOST_STEPS = 1 << 22
_LONGEST_RULE = 64


def normalizers_of(path: Path, blob: bytes) -> list[dict[str, Any]]:
    """Return the steps that normalize as a model's table does.

    Args:
        path: name of the model's file.
        blob: the table; it may be empty.

    Raises:
        UserError: the table is damaged, or rewrites sequences in a way that no step has.
    """
    if not blob:
        return []
    rules = read_rules(path, blob)
    of_characters = {key: value for key, value in rules.items() if len(key) == 1}
    of_sequences = {key: value for key, value in rules.items() if len(key) > 1}
    # A character that the table removes anyway costs no text that holds it.
    separator = _REMOVED if of_characters.get(_REMOVED) == "" else _SEPARATOR
    steps = [
        replace(_BREAK, separator, regex=True),
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()},
        replace(separator, ""),
    ]
    if not of_sequences:
        return steps
    for key, value in of_sequences.items():
        if not _is_composition(key, value, of_characters):
            raise UserError(
                f"{path}: its normalizer rewrites {shown(key)} to {shown(value)}; only rules for "
                "single characters and compositions of Unicode can be read, or a tokenizer.json"
            )
    apart = replace(_apart(of_sequences), separator, regex=True)
    return [*steps, apart, {"type": "NFC"}, replace(separator, "")]


def read_rules(path: Path, blob: bytes) -> dict[str, str]:
    """Return what the table writes for each sequence of characters.

    Raises:
        UserError: the table is damaged.
    """
    size = int.from_bytes(blob[:4], "little")
    if len(blob) < 8 or size % 4 or not 0 < size <= len(blob) - 4:
        raise UserError(f"{path}: the table of its normalizer is damaged; fetch the file again")
    texts = blob[4 + size :]
    rules = {}
    try:
        for key, position in _entries(np.frombuffer(blob, "<u4", size // 4, 4)):
            end = texts.index(b"\0", position)
            rules[key.decode()] = texts[position:end].decode()
    except (ValueError, IndexError) as error:  # one of them is what a decoder raises
        raise UserError(
            f"{path}: the table of its normalizer is damaged ({error}); fetch the file again"
        ) from None
    return rules


def _entries(units: np.ndarray) -> Iterator[tuple[bytes, int]]:
    """Yield the keys of a double array with their values.

    A node's unit holds the byte that leads to it in its lowest 8 bits, in bit 8 whether a key ends
    there, and above the distance to its children. A child's index is the node's, XOR the distance,
    XOR the child's byte. The child of byte 0 holds a key's value.
    """
    distances = (units >> 10) << ((units & 0x200) >> 6)
    bases = (np.arange(len(units), dtype=np.int64) ^ distances).tolist()
    labels = (units & 0x800000FF).tolist()
    has_value = (units & 0x100).astype(bool).tolist()
    children: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        if 0 < label < 256:
            children.setdefault(index ^ label, []).append(index)
    stack = [(0, b"")]
    steps = 0
    while stack:
        node, key = stack.pop()
        steps += 1
        if steps > _MOST_STEPS:
            raise ValueError(f"it has more than {_MOST_STEPS:,} bytes of rules")
        base = bases[node]
        if has_value[node]:
            yield key, int(units[base]) & 0x7FFFFFFF
        if len(key) == _LONGEST_RULE:
            raise ValueError(f"it has a rule for more than {_LONGEST_RULE} bytes")
        for child in children.get(base, ()):
            stack.append((child, key + bytes([labels[child]])))


def _is_composition(key: str, value: str, of_characters: Mapping[str, str]) -> bool:
    """Return True if the steps write `value` for `key`, or the same but for case and accents' form.

    Characters that this Python's Unicode does not know count as composed.
    """
    written = unicodedata.normalize("NFC", "".join(of_characters.get(c, c) for c in key))
    return (
        written == value
        or _folded(written) == _folded(value)
        or any(unicodedata.category(character) == "Cn" for character in value)
    )


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKD", text).casefold()


def _apart(of_sequences: Mapping[str, str]) -> str:
    """Return the pattern of the places where Unicode may not compose or sort marks.

    These are between two marks that no sequence of the table has side by side, and between a letter
    that was composed already and a further mark.
    """
    followers: dict[str, set[str]] = {}
    for key in of_sequences:
        for left, right in itertools.pairwise(key):
            if _is_mark(left) and _is_mark(right):
                followers.setdefault(left, set()).add(right)
    lefts_of: dict[tuple[str, ...], list[str]] = {}
    for left, rights in sorted(followers.items()):
        lefts_of.setdefault(tuple(sorted(rights)), []).append(left)
    begin_a_sequence = {key[0] for key in of_sequences}
    composed = {text for key, text in of_sequences.items() if len(text) == 1 and _is_mark(key[-1])}
    composed -= begin_a_sequence
    together = "".join(
        f"(?!(?<={_class(lefts)}){_class(rights)})" for rights, lefts in sorted(lefts_of.items())
    )
    codes = "".join(map(character_code, sorted(composed)))
    pattern = rf"(?<=[\p{{M}}{codes}])(?=\p{{M}}){together}"
    # A syllable of Hangul, and a final consonant.
    if "\uac00\u11a8" not in of_sequences:
        pattern += r"|(?<=[\x{AC00}-\x{D7A3}])(?=[\x{11A8}-\x{11C2}])"
    return pattern


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


def _class(characters: Sequence[str]) -> str:
    return f"[{''.join(map(character_code, characters))}]"
