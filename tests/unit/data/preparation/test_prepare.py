import gzip
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from geojax.cli.data import PrepareCommand, run
from geojax.data import (
    Corpus,
    DataSettings,
    Prepared,
    PrepareSettings,
    PrepareSource,
    SourceSettings,
    prepare,
)
from geojax.data.files import text as text_module
from geojax.data.preparation.atomic_folder import atomic_folder
from geojax.data.storage import SplitWriter, TokenStream
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError
from geojax.settings import validate

TEXTS = ["one two three\n", "öne twö <|begin|> thrée\n", "four\r\nfive", "six " * 50]


def settings_for(base, *, name="corpus", vocab_size=300, **source):
    return PrepareSettings(
        output=base,
        sources=(PrepareSource(name=name, **source),),
        vocab_size=vocab_size,
    )


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts))
    return str(path)


def documents_of(prepared, split="train"):
    """Decoded documents, after a check that each lies between its two tokens."""
    stream, tokenizer = prepared.stream(split), prepared.tokenizer
    tokens = stream.read(0, len(stream)).tolist()
    documents = []
    while tokens:
        end = tokens.index(tokenizer.eos_id)
        assert tokens[0] == tokenizer.bos_id
        assert tokenizer.bos_id not in tokens[1:end]
        documents.append(tokenizer.decode(tokens[1:end]))
        tokens = tokens[end + 1 :]
    return documents


def one_line(error):
    message = str(error.value)
    assert "\n" not in message
    return message


def test_jsonl_round_trip(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, ""], field="body")
    (prepared,) = prepare(settings_for(tmp_path, files=(source,), text_field="body"))
    assert documents_of(prepared) == TEXTS
    assert prepared.manifest.splits["train"].documents == 4
    assert prepared.manifest.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_text(r'{"text": "\ud83d\ude00 and \ud83d alone"}')
    (prepared,) = prepare(settings_for(tmp_path, files=(str(tmp_path / "a.jsonl"),)))
    assert documents_of(prepared) == ["\N{GRINNING FACE} and \N{REPLACEMENT CHARACTER} alone"]


def test_text_files_folders_globs_and_gzip_each_once(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep" / ".git").mkdir(parents=True)
    (folder / "b.txt").write_text("bee")
    (folder / "deep" / "a.md").write_text("crlf\r\nends")
    (folder / "deep" / ".git" / "hidden.txt").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"zipped"))
    files = (str(folder), str(folder / "**" / "*.md"), str(tmp_path / "z.txt.gz"))
    (prepared,) = prepare(settings_for(tmp_path, files=files))
    assert documents_of(prepared) == ["bee", "crlf\nends", "zipped"]


def test_a_long_document_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 16)
    text = "".join(f"line {number} of the text\n" for number in range(99)) + "x" * 99
    (tmp_path / "long.txt").write_text(text)
    (prepared,) = prepare(settings_for(tmp_path, files=(str(tmp_path / "long.txt"),)))
    assert documents_of(prepared) == [text]


def test_hold_out_is_disjoint_near_its_share_and_keeps_duplicates_together(tmp_path):
    texts = [f"document number {number}" for number in range(1000)] * 2
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    (prepared,) = prepare(settings_for(tmp_path, files=(source,), validation_fraction=0.1))
    train, held_out = documents_of(prepared), documents_of(prepared, "validation")
    assert sorted(train + held_out) == sorted(texts)
    assert not set(train) & set(held_out)
    assert len(held_out) == pytest.approx(200, abs=60)


def test_validation_files(tmp_path):
    train = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    held_out = write_jsonl(tmp_path / "b.jsonl", ["held out"])
    (prepared,) = prepare(settings_for(tmp_path, files=(train,), validation_files=(held_out,)))
    assert documents_of(prepared, "validation") == ["held out"]
    assert documents_of(prepared) == TEXTS


def test_sources_share_the_tokenizer_and_a_given_one_is_copied(two_prepared, tmp_path):
    left, right = two_prepared
    assert left.tokenizer.fingerprint == right.tokenizer.fingerprint
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    given = settings_for(tmp_path, files=(source,)).model_copy(
        update={"tokenizer": left.folder / "tokenizer.json"}
    )
    (prepared,) = prepare(given)
    assert prepared.tokenizer.fingerprint == left.tokenizer.fingerprint
    assert documents_of(prepared) == TEXTS


def test_tokenizer_sample_covers_every_file(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name * 6} " * 2000)
    settings = settings_for(tmp_path, files=(str(tmp_path / "*.txt"),))
    (prepared,) = prepare(settings.model_copy(update={"tokenizer_bytes": 3000}))
    for name in "abc":
        assert len(prepared.tokenizer.encode(f" {name * 6}")) == 1


def test_shards_read_as_one_sequence(tmp_path):
    tokens = np.arange(1000)
    with SplitWriter(tmp_path, "train", "uint32", shard_tokens=64) as writer:
        for part in np.array_split(tokens, 7):
            writer.append(part)
        split = writer.finish(documents=1)
    assert [shard.tokens for shard in split.shards] == [64] * 15 + [40]
    assert all((tmp_path / shard.file).stat().st_size == shard.bytes for shard in split.shards)
    stream = TokenStream(tmp_path, split, "uint32")
    for start, stop in [(0, 1000), (0, 0), (63, 65), (64, 128), (10, 700), (999, 1000)]:
        read = stream.read(start, stop)
        assert read.dtype == np.int32
        np.testing.assert_array_equal(read, tokens[start:stop])
    np.testing.assert_array_equal(np.load(tmp_path / "train-00015.npy"), tokens[960:])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "unfinished', r"a\.jsonl:3: not valid JSON"),
        ('["text"]', r"a\.jsonl:3: expected an object, not list"),
        ('{"body": "b", "id": 1}', r"a\.jsonl:3: has no field 'text'; its fields are: body, id"),
        ('{"text": 5}', r"a\.jsonl:3: the field 'text' is no text but int"),
        ("[" * 200_000, r"a\.jsonl:3: objects or lists too deep in each other"),
        ('{"text": ' + "9" * 5000 + "}", r"a\.jsonl:3: not valid JSON"),
    ],
)
def test_a_bad_line_is_named_and_leaves_nothing_behind(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n\n{line}\n{{"text": "good"}}\n')
    settings = settings_for(tmp_path / "out", files=(str(tmp_path / "a.jsonl"),))
    with pytest.raises(UserError, match=message) as error:
        prepare(settings)
    one_line(error)
    assert [path.name for path in tmp_path.rglob("*")] in (["a.jsonl"], ["a.jsonl", "out"])


@pytest.mark.parametrize(
    ("content", "source", "message"),
    [
        (b"caf\xe9 latin", {}, r"not UTF-8 text \(byte 0xe9\)"),
        (b"", {}, "the files hold no text"),
        (b"one", {"validation_fraction": 1e-9}, "the validation set is empty"),
        (b"one", {"validation_fraction": 0.999999999}, "no document is left to train on of 1"),
    ],
)
def test_unusable_text_is_refused_and_leaves_nothing_behind(tmp_path, content, source, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        prepare(settings_for(tmp_path, files=(str(tmp_path / "a.txt"),), **source))
    one_line(error)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


DAMAGED = bytearray(gzip.compress(b"word " * 1000))
DAMAGED[len(DAMAGED) // 2] ^= 0xFF
BOMB = gzip.compress(bytes(2**24)) * 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt.gz", b"no gzip", "cannot be read"),
        ("a.txt.gz", bytes(DAMAGED), "cannot be read"),
        ("a.txt.gz", gzip.compress(b"word " * 1000)[:40], "cannot be read"),
        ("a.txt.gz", BOMB, "it expands to more than 200 times its size"),
        ("a.jsonl.gz", BOMB, "a line of more than 33,554,432 characters"),
        ("a.parquet", b"PAR1", r"a\.parquet: cannot be read"),
        ("a.parquet.gz", b"", r"\.parquet files are not compressed as a whole"),
        ("a.arrow", b"ARROW1", r"a\.arrow: cannot be read"),
        ("a.array_record", b"records", r"a\.array_record: cannot be read"),
        ("a.doc", b"text", r"the suffix \.doc is neither of text"),
    ],
    # Workers must find the same names, and gzip's header has the second of the day.
    ids=[
        *("no gzip", "damaged", "cut off", "bomb", "bomb of a line"),
        *("parquet", "parquet of gzip", "arrow", "array_record", "unknown"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        prepare(settings_for(tmp_path, files=(str(tmp_path / name),)))
    one_line(error)


def test_a_format_that_is_given_counts_for_more_than_the_suffix(tmp_path):
    (tmp_path / "a.csv").write_text("one,two\nthree,four\n")
    file = str(tmp_path / "a.csv")
    prepare(settings_for(tmp_path, name="table", files=(file,), format="text"))
    manifest = json.loads((tmp_path / "table" / "manifest.json").read_text())
    assert manifest["splits"]["train"]["documents"] == 1


def test_a_pipe_is_no_tokenizer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is no regular file"):
        Tokenizer.load(tmp_path / "pipe")


def test_missing_files_and_a_taken_output_are_refused(tmp_path, left):
    with pytest.raises(UserError, match="nowhere: no such file"):
        prepare(settings_for(tmp_path, files=("nowhere",)))
    with pytest.raises(UserError, match=r"s3://texts/a\.jsonl: is a URL"):
        prepare(settings_for(tmp_path, files=("s3://texts/a.jsonl",)))
    with pytest.raises(UserError, match="exists already"):
        prepare(settings_for(left.folder.parent, name="left", files=(__file__,), format="text"))


def copy_of(prepared, target):
    target.mkdir()
    for path in prepared.folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def edited(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DAMAGE = {
    "no folder": (lambda folder: folder.rename(folder.parent / "b"), "there is no such folder"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
    "half a manifest": (
        lambda folder: (folder / "manifest.json").write_text('{"format": "geo'),
        "manifest.json: not valid JSON",
    ),
    "deep manifest": (
        lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
        "manifest.json: not valid JSON .objects or lists too deep",
    ),
    "list": (lambda folder: (folder / "manifest.json").write_text("[]"), "expected a JSON object"),
    "version": (
        lambda folder: edited(folder, lambda content: content.update(version=99)),
        "version: is 99 where this geojax reads 1",
    ),
    "unknown key": (
        lambda folder: edited(folder, lambda content: content.update(vresion=1)),
        "vresion: unknown key",
    ),
    "escape": (
        lambda folder: edited(
            folder,
            lambda content: content["splits"]["train"]["shards"][0].update(
                file="../train-00000.npy"
            ),
        ),
        "splits.train.shards.0.file",
    ),
    "missing shard": (
        lambda folder: (folder / "train-00000.npy").unlink(),
        "train-00000.npy: is missing although",
    ),
    "truncated shard": (
        lambda folder: os.truncate(folder / "train-00000.npy", 1000),
        "train-00000.npy: is 1,000 bytes long where",
    ),
    "other tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text(
            (folder / "tokenizer.json").read_text() + " "
        ),
        "tokenizer.json: is not the one",
    ),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "tokenizer.json: not a tokenizer.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused(left, tmp_path, damage):
    harm, message = DAMAGE[damage]
    folder = copy_of(left, tmp_path / "a")
    harm(folder)
    with pytest.raises(UserError, match=message) as error:
        Prepared(folder)
    assert str(folder) in one_line(error)


def test_a_shard_of_another_type_or_of_python_objects_is_refused(left, tmp_path):
    folder = copy_of(left, tmp_path / "a")
    path = folder / "train-00000.npy"
    size = path.stat().st_size
    np.save(path, np.zeros((size - 128) // 2, np.int16))
    with pytest.raises(UserError, match="holds int16"):
        Prepared(folder).stream("train").read(0, 5)
    np.save(path, np.array([{}] * 10), allow_pickle=True)
    with path.open("ab") as file:
        file.write(b"\0" * (size - path.stat().st_size))
    with pytest.raises(UserError, match="not a shard of tokens"):
        Prepared(folder).stream("train").read(0, 5)


def test_different_tokenizers_do_not_blend(left, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (other,) = prepare(settings_for(tmp_path, files=(source,)))
    sources = tuple(
        SourceSettings(name=name, prepared=prepared.folder)
        for name, prepared in [("left", left), ("other", other)]
    )
    with pytest.raises(UserError, match="'left' and 'other' were prepared with different token"):
        Corpus.open(DataSettings(sources=sources))


def _prepare_and_hang(base):
    with atomic_folder(base / "corpus", wait=False) as partial:
        (partial / "train-00000.npy").write_bytes(b"half")
        (base / "started").touch()
        time.sleep(60)


def test_a_killed_preparation_is_detected_and_can_be_repeated(tmp_path):
    process = multiprocessing.get_context("spawn").Process(
        target=_prepare_and_hang, args=(tmp_path,)
    )
    process.start()
    while not (tmp_path / "started").exists():
        assert process.is_alive()
        time.sleep(0.02)
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    settings = settings_for(tmp_path, files=(source,))
    with pytest.raises(UserError, match="is being prepared by another process"):
        prepare(settings)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(UserError, match="its preparation was interrupted"):
        Prepared(tmp_path / "corpus")
    (prepared,) = prepare(settings)
    assert documents_of(prepared) == TEXTS
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert hidden == []


def test_command_from_arguments_and_from_a_file(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    command = PrepareCommand(files=(source,), output=tmp_path / "one", vocab_size=300)
    assert run(command) == 0
    assert "bytes of text per token" in capsys.readouterr().out
    assert documents_of(Prepared(tmp_path / "one")) == TEXTS
    config = tmp_path / "prepare.yaml"
    config.write_text(
        f"output: {tmp_path}\n"
        "vocab_size: 300\n"
        f"sources: [{{name: two, files: ['{source}']}}, {{name: three, files: ['{source}']}}]\n"
    )
    assert run(PrepareCommand(config=config)) == 0
    assert documents_of(Prepared(tmp_path / "three")) == TEXTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"files": ("a",)}, "say where to with --output"),
        ({"output": Path("x")}, "source 'x' names no files"),
        (
            {"output": Path("x"), "files": ("a",), "validation_fraction": 2},
            "validation_fraction: input should be less",
        ),
        ({"output": Path("x"), "config": Path("y")}, "give it alone"),
    ],
)
def test_command_that_makes_no_sense(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        run(validate(PrepareCommand, arguments, "geojax data prepare"))
    one_line(error)


A = {"name": "a", "prepared": "p"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": []}, "name at least one source"),
        ({"sources": [{"name": "a"}]}, "source 'a' needs one of prepared"),
        ({"sources": [A | {"builtin": "python-stdlib"}]}, "needs one of"),
        ({"sources": [{"name": "a/b", "prepared": "p"}]}, "String should match"),
        ({"sources": [A, A]}, "two sources are called 'a'"),
        (
            {"sources": [A | {"weight": 1}, A | {"name": "b"}]},
            "give every source a weight, or none: 'b' has none",
        ),
        ({"sources": [A | {"weight": 0}]}, "every source has weight 0"),
        ({"sources": [{"name": "a", "builtin": "wikipedia"}]}, "python-stdlib"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        DataSettings.model_validate(settings)


def test_a_target_without_a_name_is_refused(tmp_path, monkeypatch):
    for target in (Path("/"), Path("/..")):
        with pytest.raises(UserError, match="exists already"), atomic_folder(target, wait=False):
            pass
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with atomic_folder(Path("."), wait=False) as folder:
        (folder / "file").touch()
    assert (tmp_path / "empty" / "file").exists()


@pytest.mark.parametrize("folder", [".", "", "/"])
def test_a_folder_without_a_name_is_no_prepared_data(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"not prepared data \(it has no manifest"):
        Prepared(Path(folder))


def test_of_a_line_with_many_fields_some_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({f"field{number}" * 20: 1 for number in range(500)}))
    with pytest.raises(UserError, match=r"has no field 'text'; .* and 494 more") as error:
        prepare(settings_for(tmp_path, files=(str(path),)))
    assert len(str(error.value)) < 500
