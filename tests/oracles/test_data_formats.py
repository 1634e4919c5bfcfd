"""Files of every format are read as Hugging Face's `datasets`, pandas and Grain read them."""

import json
import random

import datasets
import grain
import pytest
from array_record.python import array_record_module

from geojax.data.files.formats import find_files
from geojax.data.preparation.file_tokens import pieces_of
from geojax.data.settings import PrepareSource

WORDS = [
    "one",
    "ärger",
    "日本",
    "😀",
    '\'quoted, "twice"',
    "\n",
    "\t",
    " ",
    "\\",
    "null",
    "nan",
    "1.0",
]


@pytest.fixture(scope="module")
def texts():
    """Texts without CR, which a reader of text lines turns into LF, and none empty."""
    draw = random.Random(3)
    return [
        f"{number} " + "".join(draw.choices(WORDS, k=draw.randrange(30))) for number in range(200)
    ]


@pytest.fixture(scope="module")
def saved(texts):
    return datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": texts})


def ours(*paths):
    files = find_files([str(path) for path in paths])
    source = PrepareSource(name="a", files=tuple(map(str, files)))
    return [piece.text for path in files for piece in pieces_of(path, source)]


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_a_file_that_datasets_writes_and_reads(saved, texts, tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    getattr(saved, f"to_{kind}")(str(path))
    options = {"data_files": str(path), "split": "train", "cache_dir": str(tmp_path / "cache")}
    theirs = datasets.load_dataset(kind, **options)["text"]
    assert ours(path) == list(theirs) == texts


def test_a_list_of_json(texts, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text} for text in texts]))
    options = {"data_files": str(path), "split": "train", "cache_dir": str(tmp_path / "cache")}
    assert ours(path) == list(datasets.load_dataset("json", **options)["text"]) == texts


def test_a_data_set_on_disk_in_several_shards(saved, texts, tmp_path):
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    theirs = datasets.load_from_disk(str(tmp_path / "saved"))["text"]
    assert ours(tmp_path / "saved") == list(theirs) == texts


def test_a_shuffled_data_set_on_disk(saved, tmp_path):
    saved.shuffle(seed=1).select(range(50)).save_to_disk(str(tmp_path / "saved"))
    theirs = datasets.load_from_disk(str(tmp_path / "saved"))["text"]
    assert ours(tmp_path / "saved") == list(theirs)


def test_array_records(texts, tmp_path):
    path = tmp_path / "a.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    theirs = [
        record.decode()
        for record in grain.MapDataset.source(grain.sources.ArrayRecordDataSource([str(path)]))
    ]
    assert ours(path) == theirs == texts
