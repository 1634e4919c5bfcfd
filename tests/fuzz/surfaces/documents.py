"""Documents that `geojax data prepare` reads: damaged, endless, or no documents."""

import functools
import gzip
import json
import random

from fuzz.case import Case
from fuzz.corpus import Corpus


def documents(corpus: Corpus, rng: random.Random) -> Case:
    """Files of documents that are damaged, endless or no documents, and hostile options."""
    line = json.dumps({"text": "one two three"}).encode() + b"\n"
    whole = gzip.compress(line * 200)
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 0xFF
    name, content = rng.choice(
        [
            ("a.jsonl", line * 20),
            ("a.jsonl.gz", whole),
            ("a.jsonl.gz", whole[: len(whole) // 2]),
            ("a.jsonl.gz", bytes(damaged)),
            ("a.txt.gz", b"no gzip"),
            ("a.jsonl", b"[" * 300_000),
            ("a.jsonl", b'{"text": ' * 100_000),
            ("a.jsonl", b'{"text": ' + b"9" * 10_000 + b"}\n"),
            ("a.jsonl", b'{"text": "' + b"\\ud800" * 10 + b'"}\n'),
            ("a.jsonl", b'{"text": NaN}\n'),
            ("a.jsonl", b"null\n"),
            ("a.txt", b"\xff\xfe\x00"),
            ("a.txt", b""),
            ("a.txt", b"word " * 100_000),
            ("a.jsonl.gz", _bomb(b'{"text": "', b"a")),
            ("a.jsonl.gz", _bomb(b"", b" ")),
            ("a.txt.gz", _bomb(b"", b"\xff")),
            ("a.parquet", b"PAR1" + bytes(100)),
            ("a\nb.txt", b"x"),
        ]
    )
    words = ["data", "prepare", name, "--output", "out"]
    options = {
        "--vocab-size": ["300", "258", "257", "0", "-1", "100000000", "1e9", "x"],
        "--validation-fraction": ["0.1", "1", "-1", "nan", "1e-300", "x"],
        "--field": ["text", "", "other", "a\nb"],
        "--format": ["text", "jsonl", "parquet", ""],
        "--validation-files": [name, "none", "fifo", "folder"],
        "--beginning-token": ["<s>", ""],
    }
    if rng.random() < 0.5:
        option = rng.choice(list(options))
        words += [option, rng.choice(options[option])]
    return Case(words, {name: content}, notes=True)


@functools.cache
def _bomb(first: bytes, repeated: bytes, size: int = 2**30) -> bytes:
    """A gzip file of a few megabytes that is a line of a gigabyte, in members of 16 MiB."""
    block = gzip.compress(repeated * 2**24, compresslevel=1)
    return gzip.compress(first) + block * (size >> 24)


DRAWS = ((3, documents),)
