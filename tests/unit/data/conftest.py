import random
import shutil
from pathlib import Path

import pytest

from geojax.data import (
    Corpus,
    DataSettings,
    Prepared,
    PrepareSettings,
    PrepareSource,
    SourceSettings,
    prepare,
)
from geojax.data.storage import SplitWriter, write_manifest
from geojax.data.verification import RECORD

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def write_texts(folder: Path, *, count: int, seed: int, words: int = 60) -> Path:
    """`count` text files of different lengths."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    for number in range(count):
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randrange(3, words)))
        (folder / f"{number:03}.txt").write_text(f"{text}\n{number}\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def two_prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, Prepared]:
    """The sources "left" and "right", prepared together; each holds a fifth out."""
    base = tmp_path_factory.mktemp("two")
    sources = tuple(
        PrepareSource(
            name=name,
            files=(str(write_texts(base / "text" / name, count=120, seed=seed)),),
            validation_fraction=0.2,
        )
        for seed, name in enumerate(["left", "right"])
    )
    settings = PrepareSettings(output=base / "prepared", sources=sources, vocab_size=300)
    left, right = prepare(settings)
    return left, right


@pytest.fixture(scope="session")
def left(two_prepared: tuple[Prepared, Prepared]) -> Prepared:
    return two_prepared[0]


@pytest.fixture(scope="session")
def corpus(left: Prepared) -> Corpus:
    return Corpus.open(DataSettings(sources=(SourceSettings(name="left", prepared=left.folder),)))


@pytest.fixture
def folder(left: Prepared, tmp_path: Path) -> Path:
    """A copy of a prepared folder whose training tokens lie in five shards."""
    folder = tmp_path / "left"
    shutil.copytree(left.folder, folder)
    (folder / RECORD).unlink(missing_ok=True)
    tokens = left.stream("train").read(0, len(left.stream("train")))
    with SplitWriter(folder, "train", left.manifest.dtype, len(tokens) // 5 + 1) as writer:
        writer.append(tokens)
        train = writer.finish(left.manifest.splits["train"].documents)
    splits = {**left.manifest.splits, "train": train}
    counts = {"text_tokens": left.manifest.tokens_of_text, "marked": False}
    write_manifest(folder, left.tokenizer, splits, left.manifest.text_bytes, **counts)
    return folder
