"""Damage to files: bytes that are changed, cut or put in, and values of JSON that are replaced."""

import json
import random
from typing import Any

from fuzz.case import KINDS, Case
from fuzz.values import ANYTHING

JSON_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    10**40,
    1e308,
    -1e-300,
    float("nan"),
    float("inf"),
    0.5,
    "",
    "x",
    "x" * 2000,
    "a\nb",
    "../../x",
    "/dev/zero",
    "fifo",
    "\0",
    "\ud800",
    "\N{PILE OF POO}",
    "1e8",
    [],
    {},
    [[]],
    [None],
    [0],
    ["x"],
    [1, 2, 3],
    {"x": 1},
    {"": None},
    [0] * 5000,
)
"""Values that some key of a JSON file may be given."""


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Change, cut, repeat or put in a few bytes of a text."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(content) + 1)
        upto = min(len(content), at + rng.choice([1, 5, 50]))
        junk = rng.choice([*ANYTHING, "\t", "\0", "\r", "---\n", "...\n", "<<: *x\n", "&x ", "  "])
        replacement = rng.choice(
            [b"", junk.encode(), content[at:upto] * 2, bytes([rng.randrange(256)]), b"\xff"]
        )
        content = content[:at] + replacement + content[rng.choice([at, upto]) :]
    return content


def flipped(content: bytes, rng: random.Random) -> bytes:
    """Flip a bit, cut the end off, add to it, or put zeros or nothing in the place of all."""
    if not content:
        return b"\0"
    at = rng.randrange(len(content))
    bit = bytes([content[at] ^ 1 << rng.randrange(8)])
    return rng.choice(
        [
            content[:at] + bit + content[at + 1 :],
            content[:at],
            content + content[: at + 1],
            bytes(len(content)),
            b"",
            bytes(rng.randrange(256) for _ in range(min(len(content), 4096))),
        ]
    )


def places_of(document: Any) -> list[tuple[Any, Any]]:
    """List all values of a document, at any depth: each as what holds it and its key there."""
    places: list[tuple[Any, Any]] = []
    for key, inner in list(document.items() if isinstance(document, dict) else enumerate(document)):
        places.append((document, key))
        if isinstance(inner, dict | list):
            places += places_of(inner)
    return places


def with_other_value(content: bytes, rng: random.Random, values: tuple[Any, ...] = ()) -> bytes:
    """Replace, remove or repeat one value of a JSON document, at any depth."""
    document = json.loads(content)
    owner, key = rng.choice(places_of(document))
    if rng.random() < 0.2:
        del owner[key]
    elif rng.random() < 0.2 and isinstance(owner, dict):
        owner[rng.choice(["x", "", "a\nb", "x" * 1000, f"{key} "])] = owner[key]
    else:
        owner[key] = rng.choice([*JSON_VALUES, *values])
    return json.dumps(document).encode()


def harm(case: Case, name: str, rng: random.Random) -> None:
    """Damage one file of a case: other bytes, another value, another kind of file, or none."""
    content = case.files[name]
    is_json = name.endswith(".json") and b"{" in content[:10]
    choice = rng.random()
    if is_json and choice < 0.5:
        case.files[name] = with_other_value(content, rng)
    elif choice < 0.7:
        is_text = name.endswith((".json", ".jsonl", ".yaml", ".jinja"))
        case.files[name] = (mutated if is_text else flipped)(content, rng)
    elif choice < 0.8:
        case.files[name] = rng.choice(
            [
                b"",
                b"[" * 100_000,
                b"{}",
                b"[]",
                b"null",
                b"\xff\xfe",
                b'{"a": ' * 50_000,
                b"9" * 5000,
            ]
        )
    elif choice < 0.9:
        del case.files[name]
    else:
        case.kinds[name] = rng.choice(KINDS)
