"""Small files of tokenizers: SentencePiece models, ranks of tiktoken, vocabularies with merges."""

import base64
import json
import struct
from collections.abc import Mapping
from pathlib import Path

from tokenizers import pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE, WORD = 1, 2, 3
SPECIAL_PIECES = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTE_PIECES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
LETTERS = [(letter, -9.0 - place, NORMAL) for place, letter in enumerate("▁abcdefgh<>/s")]
WORDS = [("ab", -1.0, NORMAL), ("▁ab", -2.0, NORMAL), ("cd", -3.0, NORMAL), ("abcd", -4.0, NORMAL)]
PIECES = [*SPECIAL_PIECES, *WORDS, *LETTERS]


def sentencepiece_model(
    pieces=PIECES,
    training: Mapping[int, int | str] | None = None,
    normalizer: Mapping[int, int | bytes] | None = None,
    denormalizer: Mapping[int, bytes] | None = None,
) -> bytes:
    """Write a model; settings are given by their field's number."""
    message = b"".join(
        field(1, field(1, text) + field(2, score) + field(3, kind)) for text, score, kind in pieces
    )
    message += field(2, settings({3: BPE, **(training or {})}))
    message += field(3, settings({4: 0, **(normalizer or {})}))
    return message + (field(5, settings(denormalizer)) if denormalizer else b"")


def settings(values: Mapping[int, int | str | bytes]) -> bytes:
    return b"".join(field(number, value) for number, value in values.items())


def field(number: int, value: int | float | str | bytes) -> bytes:
    """Write a field of a message of protocol buffers."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def charsmap(rules: Mapping[str, str]) -> bytes:
    """Write a table of a normalizer: a double array whose keys are laid out one by one."""
    nodes = {b"": 0}
    for key in sorted(rule.encode() for rule in rules):
        for end in range(1, len(key) + 1):
            nodes.setdefault(key[:end], len(nodes))
    # Children of node n begin in the block of 256 units that is its own.
    place = {prefix: 0 for prefix in nodes if not prefix}
    for prefix in nodes:
        if prefix:
            place[prefix] = (nodes[prefix[:-1]] + 1) * 256 ^ prefix[-1]
    units = [0x800000FF] * ((len(nodes) + 1) * 256)
    texts, offsets = b"", {}
    for key, value in rules.items():
        offsets[key.encode()] = len(texts)
        texts += value.encode() + b"\0"
    for prefix, number in nodes.items():
        base = (number + 1) * 256
        distance = place[prefix] ^ base
        label = prefix[-1] if prefix else 0
        # Distances are small here, or multiples of 256 with the bit that says so.
        unit = (distance << 10 if distance < 1 << 21 else (distance >> 8) << 10 | 0x200) | label
        if prefix in offsets:
            unit |= 0x100
            units[base] = 0x80000000 | offsets[prefix]
        units[place[prefix]] = unit
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + texts


def ranks(tokens=(b"ab", b" a")) -> bytes:
    """Write a file of tiktoken: all bytes, and `tokens`."""
    every = [*(bytes([byte]) for byte in range(256)), *tokens]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(every)]
    return b"\n".join(lines) + b"\n"


def write_vocabulary(folder: Path, tokens=("ab", "abc", "<|endoftext|>")) -> None:
    """Write vocab.json and merges.txt of GPT-2's kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {token: number for number, token in enumerate([*alphabet, *tokens])}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
