"""Prepared data whose manifest, tokenizer or shards are damaged, or exchanged."""

import hashlib
import json
import random

import numpy as np

from fuzz.case import Case
from fuzz.corpus import Corpus
from fuzz.damage import harm, with_other_value

TRAIN_SHARD = "data/train-00000.npy"
MANIFEST = "data/manifest.json"


def prepared(corpus: Corpus, rng: random.Random) -> Case:
    """Data of which one file is damaged, read by a run, or shown."""
    files = {"small.yaml": corpus.configs["small.yaml"], **corpus.prepared}
    sources = "--data.sources=[{name: a, prepared: data}]"
    train = ["train", "small.yaml", sources]
    verify = rng.choice([["data", "--verify"], ["small.yaml", sources, "--verify"]])
    case = Case(rng.choice([train, ["data", "show", *verify]]), files, writes=("run",))
    damage = rng.choice(["any", "any", "manifest", "header", "ids", "swap", "twice", "gone"])
    if damage == "any":
        harm(case, rng.choice(list(corpus.prepared)), rng)
    elif damage == "manifest":
        files[MANIFEST] = with_other_value(files[MANIFEST], rng, _OTHER_NAMES)
    elif damage == "header":
        shard = bytearray(files[TRAIN_SHARD])
        shard[rng.randrange(128)] ^= 1 << rng.randrange(8)
        files[TRAIN_SHARD] = bytes(shard)
    elif damage == "ids":
        files[TRAIN_SHARD] = _with_other_ids(files[TRAIN_SHARD], rng)
        case.must_be_refused = files[TRAIN_SHARD] != corpus.prepared[TRAIN_SHARD]
        if rng.random() < 0.5:  # so that only the numbers themselves are wrong
            _sign_again(files)
    elif damage == "swap":
        entry = json.loads(files[MANIFEST])
        tokenizer = entry["tokenizer"]
        tokenizer["beginning"], tokenizer["end"] = tokenizer["end"], tokenizer["beginning"]
        case.must_be_refused = True
        files[MANIFEST] = json.dumps(entry).encode()
    elif damage == "twice":
        entry = json.loads(files[MANIFEST])
        entry["splits"]["train"]["shards"] *= 2
        case.must_be_refused = True
        files[MANIFEST] = json.dumps(entry).encode()
    else:
        del files[rng.choice(list(corpus.prepared))]
    return case


_OTHER_NAMES = ("../x.npy", "/dev/zero", "train-00000.npy", "manifest.json", "uint32", "0" * 64)


def _with_other_ids(shard: bytes, rng: random.Random) -> bytes:
    """Put tokens into a shard that no vocabulary has."""
    header, ids = shard[:128], np.frombuffer(shard[128:], np.uint16).copy()
    ids[rng.randrange(len(ids)) :][: rng.choice([1, 100, 10**6])] = rng.choice([65535, 1000, 303])
    return header + ids.tobytes()


def _sign_again(files: dict[str, bytes]) -> None:
    """Write the checksum of a shard into its manifest."""

    entry = json.loads(files[MANIFEST])
    digest = hashlib.sha256(files[TRAIN_SHARD][128:]).hexdigest()
    entry["splits"]["train"]["shards"][0]["sha256"] = digest
    files[MANIFEST] = json.dumps(entry).encode()


def shown(corpus: Corpus, rng: random.Random) -> Case:
    """Data of which any file is damaged, of which a batch is shown with hostile options."""
    numbers = ("0", "-1", "1", "7", "1000000000", "99999999999999999999", "nan", "x", "")
    options = {
        "--step": numbers,
        "--sequences": numbers,
        "--tokens": numbers,
        "--sequence-length": (*numbers, "16", "300"),
        "--validation": ("data", "a", "", "x" * 300, "\x1b[31m"),
    }
    case = Case(["data", "show", rng.choice(["data", "data", "small.yaml"])], {})
    case.files |= {"small.yaml": corpus.configs["small.yaml"], **corpus.prepared}
    for option in rng.sample(list(options), rng.choice([0, 1, 1, 2])):
        case.arguments.append(f"{option}={rng.choice(options[option])}")
    if rng.random() < 0.5:
        harm(case, rng.choice(list(corpus.prepared)), rng)
    return case


DRAWS = ((3, prepared), (2, shown))
