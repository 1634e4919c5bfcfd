"""Compares the sequences of `data.order: megatron` with the samples of megatron-core's datasets.

`launch/megatron_environment` runs it. Each row of the table is one run: megatron-core writes its
files and builds its datasets. All indices are compared, and up to `MOST_READ` samples with the
batch that a `Loader` returns: tokens and labels. Where every sequence of the files ends with the
token of the end, and has it nowhere else, so are the loss mask, the position ids and, for short
samples, the attention mask.

    python tests/oracles/megatron_order.py                      compare; a difference exits with 1
    python tests/oracles/megatron_order.py --record FILE.json   write the indices of small cases
"""

import argparse
import itertools
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import megatron.core
import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from geojax.data import Corpus, DataSettings, Loader, Tokenizer
from geojax.data.megatron.blend import MegatronBlend, megatron_blend
from geojax.data.megatron.sample_order import SampleOrder

VOCABULARY = 300
MOST_READ = 400
"""Most samples of a run whose tokens are compared, evenly spaced."""
LONGEST_MASK = 128
"""Longest sequence of which the attention mask is compared."""


class Words:
    """The part of a tokenizer that megatron-core's datasets read."""

    def __init__(self, eod: int):
        self.eod = eod
        self.vocab_size = VOCABULARY
        self.unique_identifiers = {"eod": eod}


class Files(NamedTuple):
    """Kind of a data set: lengths of its documents with their end token, and how it is written."""

    name: str
    documents: int
    longest: int
    shortest: int = 1
    dtype: type = np.uint16
    sentences: int = 1
    """Sequences of a document; only the last one ends with the end token."""
    has_eod: bool = True

    @property
    def marks_ends(self) -> bool:
        """Every sequence ends with the end token."""
        return self.has_eod and self.sentences == 1


class Blend(NamedTuple):
    """A run's data, and its number of samples in epochs of the first data set."""

    files: Sequence[Files]
    sequence_length: int
    epochs: float
    seed: int = 1234
    weights: Sequence[float] | None = None
    split: str = "1,0,0"


ONES = Files("ones", 900, 1)
SHORT = Files("short", 300, 40)
MIXED = Files("mixed", 150, 3000)
LONG = Files("long", 6, 20_000, dtype=np.int32)
HOLES = Files("holes", 400, 4, shortest=0)
WIDE = Files("wide", 2_000, 60)
SENTENCES = Files("sentences", 700, 90, sentences=3)
BARE = Files("bare", 200, 100, has_eod=False)
ONE = Files("one", 1, 5_000)
ALL = (ONES, HOLES, SHORT, MIXED, LONG, SENTENCES, BARE, ONE)
EPOCHS = (0.3, 1.0, 1.5, 1.79, 1.81, 1.97, 3.0, 3.4)


def blends() -> list[Blend]:
    single = [
        Blend([files], length, epochs, seed)
        for files in ALL
        for length, epochs, seed in zip(
            itertools.cycle((8, 33, 100, 512)), EPOCHS, itertools.cycle((1234, 0, 7)), strict=False
        )
    ]
    splits = [
        Blend([files], 64, epochs, split=split)
        for split in ("969,30,1", "0.9,0.1", "98,2,0", "1,1,1", "2.5,1.25,0.3", "99")
        # megatron-core never returns where a share of the split holds no documents.
        for files, epochs in ((WIDE, 0.7), (WIDE, 2.3), (SENTENCES, 1.0))
    ]
    weighted = [
        Blend(files, length, epochs, seed, weights, "80,20,0")
        for files, weights in (
            ([MIXED], [1.0]),
            ([SHORT], [0.3]),
            ([MIXED, SHORT], [0.7, 0.3]),
            ([MIXED, SHORT], [1.0, 1.0]),
            ([SHORT, LONG], [1.0, 1e-3]),
            ([MIXED, SHORT, LONG], [0.5, 0.3, 0.2]),
            ([MIXED, SENTENCES, SHORT], [3.0, 5.0, 7.0]),
            ([ONES, HOLES, BARE], [0.1, 0.1, 0.1]),
        )
        for length, epochs, seed in ((16, 0.5, 1), (64, 1.6, 42), (128, 3.2, 1234))
    ]
    by_size = [
        Blend(files, 32, 0.9, 5)
        for files in ([MIXED, SHORT], [SHORT, SENTENCES, LONG], [LONG, MIXED, BARE])
    ]
    return [*single, *splits, *weighted, *by_size]


def write_files(prefix: Path, files: Files, eod: int, seed: int) -> int:
    """Write a data set with megatron-core's own writer; returns its number of tokens."""
    draw = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=files.dtype)
    total = 0
    for _ in range(files.documents):
        lengths = [
            int(draw.integers(files.shortest, files.longest + 1)) for _ in range(files.sentences)
        ]
        tokens = draw.integers(2, VOCABULARY - 10, sum(lengths))
        if files.has_eod:
            tokens[-1:] = eod
        builder.add_document(torch.from_numpy(tokens), lengths)
        total += len(tokens)
    builder.finalize(f"{prefix}.idx")
    return total


def megatron_datasets(
    blend: Blend, prefixes: Sequence[Path], samples: int, eod: int, has_mask: bool
) -> list:
    """Build megatron-core's training and validation data sets of a run."""
    weights = None if blend.weights is None else list(blend.weights)
    keeps_apart = all(files.marks_ends for files in blend.files)
    config = GPTDatasetConfig(
        random_seed=blend.seed,
        sequence_length=blend.sequence_length,
        blend=([str(prefix) for prefix in prefixes], weights),
        split=blend.split,
        tokenizer=Words(eod),
        reset_position_ids=keeps_apart,
        reset_attention_mask=keeps_apart,
        eod_mask_loss=keeps_apart,
        create_attention_mask=has_mask,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 8, 8], lambda: True, config)
    return builder.build()


class Compared(NamedTuple):
    """What was compared, and what differs."""

    samples: int
    difference: str | None


def compare(blend: Blend, folder: Path, tokenizer: Tokenizer, tokenizer_file: Path) -> Compared:
    """Compare all samples of one run."""
    prefixes = [folder / f"{number}.{files.name}_text" for number, files in enumerate(blend.files)]
    tokens = [
        write_files(prefix, files, tokenizer.eos_id, number)
        for number, (prefix, files) in enumerate(zip(prefixes, blend.files, strict=True))
    ]
    total = max(int(blend.epochs * tokens[0] / blend.sequence_length), 1)
    has_mask = blend.sequence_length <= LONGEST_MASK
    train, validation, _ = megatron_datasets(blend, prefixes, total, tokenizer.eos_id, has_mask)
    weights = blend.weights or [None] * len(prefixes)
    settings = DataSettings(
        order="megatron",
        tokenizer=tokenizer_file,
        sources=[
            {"name": prefix.name, "megatron": prefix, "weight": weight, "split": blend.split}
            for prefix, weight in zip(prefixes, weights, strict=True)
        ],
    )
    corpus = Corpus.open(settings)
    options = {
        "sequence_length": blend.sequence_length,
        "seed": blend.seed,
        "total_sequences": total,
    }
    if unlike := index_difference(train, megatron_blend(corpus.sources, **options)):
        return Compared(len(train), unlike)
    count = len(train)
    rows = np.unique(np.linspace(0, count - 1, MOST_READ).astype(int))
    batch = Loader(corpus, global_batch_size=count, sequences=rows.tolist(), **options).batch(0)
    names = {"tokens": "tokens", "targets": "labels"}
    if all(files.marks_ends for files in blend.files):
        names |= {"loss_mask": "loss_mask", "positions": "position_ids"}
    for row, number in enumerate(rows.tolist()):
        sample = train[number]
        for ours, theirs in names.items():
            if not np.array_equal(batch[ours][row], sample[theirs].numpy()):
                return Compared(count, f"{theirs} of sample {number}")
        if has_mask and len(names) == 4:
            segments = batch["segment_ids"][row]
            seen = np.tril(segments[:, None] == segments[None, :])
            if not np.array_equal(seen, ~sample["attention_mask"][0].numpy()):
                return Compared(count, f"attention_mask of sample {number}")
    return Compared(count, held_out_difference(validation, corpus))


def index_difference(
    train: BlendedDataset | GPTDataset, blend: MegatronBlend | SampleOrder
) -> str | None:
    """Say which index differs; None: none does."""
    if isinstance(train, BlendedDataset):
        assert isinstance(blend, MegatronBlend), "one text with a weight is a blend of one"
        if not np.array_equal(train.dataset_index, blend.choices.texts):
            return "dataset index"
        for number in range(0, len(train), 97):
            if blend.choices.number_within(number) != train.dataset_sample_index[number]:
                return "dataset sample index"
        datasets, orders = train.datasets, blend.orders
    else:
        datasets, orders = [train], [blend]
    for dataset, order in zip(datasets, orders, strict=True):
        if not np.array_equal(dataset.document_index, order.documents):
            return "document index"
        if not np.array_equal(dataset.shuffle_index, order.samples):
            return "shuffle index"
    return None


def held_out_difference(
    validation: BlendedDataset | GPTDataset | None, corpus: Corpus
) -> str | None:
    """Say which source holds out other tokens than megatron-core's; None: none does."""
    held_out = getattr(validation, "datasets", [validation])
    for source, dataset in itertools.zip_longest(corpus.sources, held_out):
        count = source.text.token_count("validation")
        if dataset is None:
            if count:
                return f"validation set of {source.name}"
            continue
        expected = [np.asarray(dataset.dataset[int(index)]) for index in dataset.indices]
        found = source.text.window("validation", 0, count).tokens
        if not np.array_equal(found, np.concatenate(expected)):
            return f"validation set of {source.name}"
    return None


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--record", type=Path, help="write the indices of small cases here")
    options = arguments.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_file = Path(folder) / "tokenizer.json"
        tokenizer = Tokenizer.train(
            [" ".join(map("".join, itertools.product("abcdefgh", repeat=2)))],
            vocabulary_size=VOCABULARY,
        )
        assert tokenizer.vocabulary_size == VOCABULARY, "the text has too few pairs"
        tokenizer.save(tokenizer_file)
        if options.record is not None:
            options.record.write_text(json.dumps(recorded(Path(folder)), indent=None) + "\n")
            return 0
        return print_table(Path(folder), tokenizer, tokenizer_file)


def print_table(folder: Path, tokenizer: Tokenizer, tokenizer_file: Path) -> int:
    """Compare every blend; returns the exit code."""
    print(f"megatron-core {megatron.core.__version__}, numpy {np.__version__}")
    print(f"{'data':28}{'weights':>16}{'split':>14}{'S':>5}{'epochs':>8}{'seed':>6}{'samples':>9}")
    differences = total = 0
    for number, blend in enumerate(blends()):
        (folder / str(number)).mkdir()
        samples, difference = compare(blend, folder / str(number), tokenizer, tokenizer_file)
        names = "+".join(files.name for files in blend.files)
        weights = ":".join(f"{weight:g}" for weight in blend.weights or ()) or "-"
        print(
            f"{names:28}{weights:>16}{blend.split:>14}{blend.sequence_length:>5}"
            f"{blend.epochs:>8g}{blend.seed:>6}{samples:>9,}  {difference or 'equal'}",
            flush=True,
        )
        differences += difference is not None
        total += samples
    print(f"{total:,} samples of {number + 1} runs; {differences} runs differ")
    return 1 if differences else 0


def recorded(folder: Path) -> dict:
    """Return the indices of small cases, for tests that have no megatron-core."""
    draw = np.random.default_rng(20)
    cases = []
    for number, (documents, length, samples, seed) in enumerate(
        ((20, 16, 12, 1234), (20, 16, 30, 1234), (17, 9, 57, 0), (9, 32, 14, 7), (40, 8, 181, 5))
    ):
        lengths = draw.integers(1, 41, documents).tolist()
        prefix = folder / f"case{number}"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for tokens in lengths:
            builder.add_document(torch.zeros(tokens, dtype=torch.int64), [tokens])
        builder.finalize(f"{prefix}.idx")
        files = Files("", documents, 40)
        blend = Blend([files], length, 0, seed, split="80,20,0")
        train = megatron_datasets(blend, [prefix], samples, 0, False)[0]
        cases.append(
            {
                "lengths": lengths,
                "split": blend.split,
                "sequence_length": length,
                "samples": samples,
                "seed": seed,
                "document_index": train.document_index.tolist(),
                "sample_index": train.sample_index.tolist(),
                "shuffle_index": train.shuffle_index.tolist(),
            }
        )
    mixes = []
    for weights, size in (([0.3, 0.7], 60), ([1.0, 1.0, 1.0], 50), ([5.0, 0.02, 1.3], 120)):
        prefixes = [folder / "case0", folder / "case2", folder / "case4"][: len(weights)]
        files = Files("", 1, 1)
        blend = Blend([files] * len(weights), 8, 0, 3, weights)
        train = megatron_datasets(blend, prefixes, size, 0, False)[0]
        mixes.append(
            {
                "weights": weights,
                "samples": size,
                "sizes": [len(dataset) for dataset in train.datasets],
                "dataset_index": train.dataset_index.tolist(),
                "dataset_sample_index": train.dataset_sample_index.tolist(),
            }
        )
    how = "launch/megatron_environment --record tests/data/megatron_orders.json"
    return {
        "how": how,
        "megatron_core": megatron.core.__version__,
        "texts": cases,
        "blends": mixes,
    }


if __name__ == "__main__":
    sys.exit(main())
