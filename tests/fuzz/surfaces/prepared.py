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
    """Data of which one file is damaged, read by a run, or judged."""
    files = {"small.yaml": corpus.configs["small.yaml"], **corpus.prepared}
    sources = "[{name: a, prepared: data}]"
    case = Case(["train", "small.yaml", f"--data.sources={sources}"], files, writes=("run",))
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


DRAWS = ((3, prepared),)
