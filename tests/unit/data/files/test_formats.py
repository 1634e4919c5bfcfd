"""Every format of files gives the same documents."""

import csv
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module

from geojax.data.files.array_records import _example_type
from geojax.data.files.formats import find_files, record_file_of
from geojax.data.preparation.file_tokens import pieces_of
from geojax.data.settings import PrepareSource
from geojax.errors import UserError

TEXTS = [f'öne, "two"\n{"three " * (number % 5)}\t{number}' for number in range(40)]


def source_of(path, **settings):
    return PrepareSource(name="a", files=(str(path),), **settings)


def texts_of(path, span=None, **settings):
    return [piece.text for piece in pieces_of(path, source_of(path, **settings), span=span)]


def write_json_lines(path):
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS))


def write_json_list(path):
    path.write_text("\n" + json.dumps([{"text": text} for text in TEXTS], indent=2))


def write_csv(path, delimiter=","):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([("id", "text"), *enumerate(TEXTS)])


def write_tsv(path):
    write_csv(path, "\t")


def table():
    return pyarrow.table({"text": TEXTS, "n": list(range(len(TEXTS)))})


def write_parquet(path):
    pyarrow.parquet.write_table(table(), path, row_group_size=9)


def write_arrow_file(path):
    with pyarrow.ipc.new_file(str(path), table().schema) as writer:
        writer.write_table(table(), max_chunksize=9)


def write_arrow_stream(path):
    with pyarrow.ipc.new_stream(str(path), table().schema) as writer:
        writer.write_table(table(), max_chunksize=9)


def write_records(path, contents):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for content in contents:
        writer.write(content)
    writer.close()


def write_texts(path):
    write_records(path, [text.encode() for text in TEXTS])


def example(**features):
    message = _example_type()()
    for name, value in features.items():
        feature = message.features.feature[name]
        if isinstance(value, str):
            feature.bytes_list.value.append(value.encode())
        else:
            feature.int64_list.value.append(value)
    return message.SerializeToString()


def write_examples(path):
    write_records(path, [example(text=text, id=number) for number, text in enumerate(TEXTS)])


WRITERS = {
    "a.jsonl": write_json_lines,
    "a.json": write_json_list,
    "a.csv": write_csv,
    "a.tsv": write_tsv,
    "a.parquet": write_parquet,
    "file.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
    "texts.array_record": write_texts,
    "examples.array_record": write_examples,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_has_the_same_documents_whole_and_in_spans(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    assert texts_of(path) == TEXTS
    for size in (1, 500, 10**9):
        spans = list(record_file_of(path, "auto").spans(path, size))
        assert [text for span in spans for text in texts_of(path, span)] == TEXTS
    if name not in ("a.json", "a.csv", "a.tsv"):
        assert len(list(record_file_of(path, "auto").spans(path, 1))) > 3


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_text_may_be_compressed(tmp_path, name, suffix):
    WRITERS[name](tmp_path / name)
    plain = (tmp_path / name).read_bytes()
    if suffix == ".gz":
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(plain))
    else:
        with pyarrow.output_stream(str(tmp_path / f"{name}.zst"), compression="zstd") as file:
            file.write(plain)
    assert texts_of(tmp_path / f"{name}{suffix}") == TEXTS


def test_a_zstd_file_that_is_damaged_or_a_bomb_is_refused(tmp_path):
    path = tmp_path / "a.txt.zst"
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(bytes(2**28))
    with pytest.raises(UserError, match="expands to more than 200 times its size"):
        texts_of(path)
    path.write_bytes(path.read_bytes()[:99])
    with pytest.raises(UserError, match=r"a\.txt\.zst: cannot be read"):
        texts_of(path)


def test_the_only_column_of_texts_is_the_text_and_others_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "content": ["one"]}), path)
    assert texts_of(path) == ["one"]
    two = pyarrow.table({"title": ["t"], "content": ["one"]})
    pyarrow.parquet.write_table(two, path)
    with pytest.raises(UserError, match=r"name the one .*; its fields are: content, title"):
        texts_of(path)
    assert texts_of(path, text_field="content") == ["one"]
    with pytest.raises(UserError, match="has no field 'body'"):
        texts_of(path, text_field="body")


def test_a_text_that_is_missing_is_named_by_its_row(tmp_path):
    path = tmp_path / "a.parquet"
    missing = pyarrow.table({"text": ["one", "two", None]})
    pyarrow.parquet.write_table(missing, path, row_group_size=1)
    with pytest.raises(UserError, match=r"a\.parquet: row 3: the field 'text' is no text but null"):
        texts_of(path)
    numbers = tmp_path / "n.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), numbers)
    with pytest.raises(UserError, match="row 1: the field 'text' is no text but int"):
        texts_of(numbers)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,id\none,1\ntwo\n", r"row 2 \(line 3\): has 1 values"),
        ("a.csv", 'text\n"one\n', r"a\.csv:2: not valid CSV"),
        ("a.csv", "text,text\n", r"a\.csv:1: two columns have the same name"),
        ("a.json", '[{"text": "a"} {"text": "b"}]', "record 2: not valid JSON .no comma"),
        ("a.json", '[{"text": "a"},', r"record 2: not valid JSON \(the list has no end"),
        ("a.json", '[{"text": "a"}, 5]', "record 2: expected an object, not int"),
        ("a.json", '[{"text": "a"}, {"text": }]', "record 2: not valid JSON"),
        ("a.json", "[" * 99999, "record 1: objects or lists too deep"),
    ],
)
def test_a_bad_record_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        texts_of(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_text_that_looks_like_a_message_is_a_text_in_a_file_of_texts(tmp_path):
    path = tmp_path / "a.array_record"
    write_records(path, [b"plain", example(text="no message")])
    assert texts_of(path)[0] == "plain"
    write_records(path, [example(text="one"), b"plain"])
    with pytest.raises(UserError, match=r"record 2: no tf\.train\.Example, as the first record"):
        texts_of(path)


def test_a_missing_library_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"require pyarrow; pip install 'geojax-trainer\[data\]'"):
        texts_of(tmp_path / "a.parquet")


def test_a_folder_of_the_hub_and_a_saved_data_set(tmp_path):
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    (hub.parent / "README.md").write_text("# A data set")
    for number in range(2):
        write_parquet(hub / f"train-{number:05}-of-00002.parquet")
    assert [path.name for path in find_files([str(hub.parent)])] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    write_parquet(hub / "test-00000-of-00001.parquet")
    with pytest.raises(UserError, match=r"the splits 'test' and 'train'; .*/\*\*/train-\*'"):
        find_files([str(hub.parent)])
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("dataset_info.json", "state.json"):
        (saved / name).write_text("{}")
    write_arrow_stream(saved / "data-00000-of-00001.arrow")
    assert find_files([str(saved)]) == [saved / "data-00000-of-00001.arrow"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="'train' and 'test'; name the folder of one of them"):
        find_files([str(tmp_path)])


def test_a_readme_is_a_document_where_no_records_are(tmp_path):
    (tmp_path / "README.md").write_text("# Words")
    (tmp_path / "a.txt").write_text("words")
    assert len(find_files([str(tmp_path)])) == 2
