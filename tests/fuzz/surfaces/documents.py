"""Documents that `geojax data prepare` reads: damaged, endless, or no documents."""

import functools
import gzip
import io
import json
import random

import pyarrow
import pyarrow.parquet
from support.indexed_files import indexed_bytes

from fuzz.case import Case
from fuzz.corpus import Corpus
from fuzz.damage import harm


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
            ("a.parquet", _damaged_table(rng, "parquet")),
            ("a.arrow", _damaged_table(rng, "arrow")),
            ("a.arrow", bytes(100)),
            ("a.array_record", bytes(70_000)),
            ("a.csv", b'text\n"' + b"a" * 200_000),
            ("a.csv", b"text\n\x00\n"),
            ("a.json", b"[" * 300_000),
            ("a.json", b'[{"text": "a"},' * 3),
            ("a.txt.zst", b"no zstd"),
            ("a\nb.txt", b"x"),
        ]
    )
    words = ["data", "prepare", name, "--output", "out"]
    options = {
        "--vocab-size": ["300", "258", "257", "0", "-1", "100000000", "1e9", "x"],
        "--validation-fraction": ["0.1", "1", "-1", "nan", "1e-300", "x"],
        "--text-field": ["text", "", "other", "a\nb"],
        "--format": ["text", "jsonl", "chat", "sharegpt", "parquet", ""],
        "--validation-files": [name, "none", "fifo", "folder"],
        "--beginning-token": ["<s>", ""],
    }
    if rng.random() < 0.5:
        option = rng.choice(list(options))
        words += [option, rng.choice(options[option])]
    return Case(words, {name: content}, notes=True)


def _damaged_table(rng: random.Random, kind: str) -> bytes:
    """Write a table of texts, and change some of its bytes."""
    table = pyarrow.table({"text": ["one two three", "four"] * 50})
    file = io.BytesIO()
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    content = bytearray(file.getvalue())
    for _ in range(rng.choice([1, 10])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


@functools.cache
def _bomb(first: bytes, repeated: bytes, size: int = 2**30) -> bytes:
    """A gzip file of a few megabytes that is a line of a gigabyte, in members of 16 MiB."""
    block = gzip.compress(repeated * 2**24, compresslevel=1)
    return gzip.compress(first) + block * (size >> 24)


def megatron(corpus: Corpus, rng: random.Random) -> Case:
    """Files of Megatron-LM, one of them damaged, that a run reads in place or that are prepared."""
    lengths = [rng.choice([0, 1, 40, 300]) for _ in range(rng.choice([1, 2, 9]))]
    contents = indexed_bytes([[[token % 250 for token in range(each)]] for each in lengths])
    files = dict(zip(("t.idx", "t.bin"), contents, strict=True))
    tokenizer = {"tokenizer.json": corpus.prepared["data/tokenizer.json"]}
    source = {"name": "a", "megatron": rng.choice(["t", "t.bin", "t.idx", "u"])}
    split = rng.choice([None, None, "969,30,1", "1,0,0", "0,0,0", "nan,1", "1,2,3,4", ""])
    if split is not None:
        source["split"] = split
    order = rng.choice(["geojax", "megatron", "megatron", "x"])
    given = [f"--data.sources={json.dumps([source])}", "--data.tokenizer=tokenizer.json"]
    run = ["small.yaml", *given, f"--data.order={order}"]
    case = Case(
        rng.choice(
            [
                ["train", *run],
                ["data", "show", *run],
                ["data", "prepare", "t.idx", "--tokenizer=tokenizer.json", "--output=out"],
            ]
        ),
        {"small.yaml": corpus.configs["small.yaml"], **tokenizer, **files},
        writes=("run",),
        notes=True,
    )
    if rng.random() < 0.7:
        harm(case, rng.choice(["t.idx", "t.bin", "t.idx", "tokenizer.json"]), rng)
    return case


DRAWS = ((3, documents), (2, megatron))
