"""`geojax data show` prints a run's data safely and plainly, and names every damaged shard."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.chats import TALKS, write_tokenizer

from geojax.cli.main import run
from geojax.data import Prepared, PrepareSettings, PrepareSource, prepare
from geojax.data.settings import Tokenization
from geojax.exit_codes import USAGE

HOSTILE = "\x1b[31m [red]b[/red] :smile: \u202e \\n \x9b\x07\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders "words" and "talks": text and conversations, each with a validation set."""
    base = tmp_path_factory.mktemp("shown")
    (base / "texts").mkdir()
    for number in range(40):
        (base / "texts" / f"{number}.txt").write_text(f"{HOSTILE} é {number} " * 3)
    words = PrepareSource(name="words", files=(str(base / "texts"),), validation_fraction=0.2)
    prepare(PrepareSettings(output=base, sources=(words,), vocab_size=300))
    lines = [json.dumps({"messages": talk}) for talk in TALKS * 5]
    (base / "talks.jsonl").write_text("\n".join(lines))
    (base / "model").mkdir()
    write_tokenizer(base / "model")
    files = (str(base / "talks.jsonl"),)
    talks = PrepareSource(name="talks", files=files, validation_files=files, format="chat")
    words = Tokenization(tokenizer=base / "model" / "tokenizer.json")
    prepare(PrepareSettings(output=base, sources=(talks,), **words.model_dump()))
    return base


@pytest.fixture
def config(folders, tmp_path):
    """The config of a run of the folder "words"."""
    content = {
        "run_directory": str(tmp_path / "run"),
        "steps": 10,
        "simulate_devices": 1,
        "model": {
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 64,
        },
        "data": {"sources": [{"name": "words", "prepared": str(folders / "words")}]},
        "batch": {"global_batch_size": 4, "sequence_length": 32},
        "precision": "fp32",
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def show(capsys, *arguments):
    assert run(["data", "show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert run(["data", "show", *map(str, arguments)]) == USAGE
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    return captured.out.splitlines(), line.removeprefix("error: ")


def pairs(out):
    """The texts and the numbers below them, of the tokens of the one sequence that is printed."""
    _, sequence = out.split("\nsequence ")
    rows = [line for line in sequence.splitlines() if line.startswith("  ")]
    return [
        pair
        for above, below in zip(rows[::2], rows[1::2], strict=True)
        for pair in zip(above.split()[1:], below.split(), strict=True)
    ]


def test_a_config_shows_what_its_run_reads(capsys, config, folders):
    out = show(capsys, config, "--sequences", 2)
    name, documents, tokens, share, epochs, held_out, *_ = out.splitlines()[1].split()
    prepared = Prepared(folders / "words")
    assert (name, share) == ("words", "100%")
    assert int(documents) == prepared.manifest.splits["train"].documents
    assert int(tokens.replace(",", "")) == len(prepared.stream("train"))
    assert int(held_out.replace(",", "")) == len(prepared.stream("validation"))
    assert float(epochs) == pytest.approx(
        40 / ((len(prepared.stream("train")) - 1) // 32), rel=0.01
    )
    assert f"words: {folders / 'words'}" in out
    assert "step 0: 4 sequences of 32 tokens" in out
    assert out.count("\nsequence ") == 2


def test_options_change_settings_and_a_run_directory_is_its_config(capsys, config):
    (line,) = show(capsys, config, "--seed", 5, "--step=3", "--json").splitlines()
    assert json.loads(line)["number"] == 12
    assert line not in show(capsys, config, "--step", 3, "--json")
    directory = config.parent / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(config.read_text())
    assert show(capsys, directory, "--seed", 5, "--step=3", "--json").strip() == line


def test_texts_reach_the_terminal_escaped(capsys, folders):
    out = show(capsys, folders / "words", "--sequences", 64)
    for character in ("\x1b", "\x9b", "\x07", "\u202e"):
        assert character not in out
    for escape in (r"\x1b", r"\x9b", r"\x07", r"\u202e", r"\\", "red", "smile"):
        assert escape in out
    assert all(len(line) <= 80 for line in out.splitlines() if "words: " not in line)


def test_every_token_stands_above_its_number_and_brackets_tell_the_mask(capsys, folders):
    arguments = (folders / "talks", "--sequence-length", 60, "--tokens", 60)
    shown = pairs(show(capsys, *arguments))
    content = json.loads(show(capsys, *arguments, "--json"))
    tokens = [*content["tokens"], content["targets"][-1]]
    assert [int(number.strip("()")) for _, number in shown] == tokens
    counted = [not number.startswith("(") for _, number in shown]
    assert counted == [False, *map(bool, content["loss_mask"])]
    assert any(counted)
    assert not all(counted)


def test_long_sequences_are_cut_with_a_line_that_says_so(capsys, folders):
    out = show(capsys, folders / "talks", "--sequence-length", 60, "--tokens", 7)
    assert out.splitlines()[-1] == "53 more tokens left out; --tokens 60 shows all"
    assert len(pairs(out)) == 7


def test_a_validation_set_is_shown_with_its_padding(capsys, folders):
    arguments = ("--validation", "talks", "--sequence-length", 100, "--step", 1)
    out = show(capsys, folders / "talks", *arguments)
    assert "batch 1 of the validation set talks" in out
    assert "\npadding: " in out


def test_nothing_is_written(capsys, folders, config):
    before = sorted(path for path in folders.rglob("*"))
    show(capsys, folders / "words", "--verify")
    show(capsys, config)
    assert sorted(path for path in folders.rglob("*")) == before
    assert not (config.parent / "run").exists()


def test_whole_folders_are_verified_in_a_line(capsys, folders, config):
    line = "verified 2 shards of "
    assert show(capsys, folders / "words", "--verify").startswith(line)
    assert show(capsys, config, "--verify").startswith(line)


@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_every_damaged_shard_is_named(capsys, folders, tmp_path, options):
    folder = tmp_path / "words"
    folder.mkdir()
    for path in (folders / "words").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    shards = sorted(folder.glob("*.npy"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-2])
    lines, error = refused(capsys, folder, *options)
    assert f"{shards[0]}: is missing although manifest.json lists it" in lines
    assert any(line.startswith(f"{shards[1]}: is ") for line in lines)
    assert f"{folder}: {len(lines)} files are damaged" in error


def test_other_tokens_are_found_by_their_checksum(capsys, folders, tmp_path):
    folder = tmp_path / "words"
    folder.mkdir()
    for path in (folders / "words").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    shard = np.load(folder / "train-00000.npy", mmap_mode="r+")
    shard[5] += 1
    shard.flush()
    show(capsys, folder)
    lines, error = refused(capsys, folder, "--verify")
    assert not lines
    assert error.startswith(f"{folder / 'train-00000.npy'}: its tokens are not those")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["FOLDERS"], "is neither a run's directory (no config.yaml) nor prepared data"),
        (["FOLDERS/words", "--seed", "1"], "--seed changes a config, and "),
        (["FOLDERS/words", "--validation", "x"], "no validation set is called 'x'; there are: "),
        (["FOLDERS/words", "--validation", "words", "--step", "99"], "has the batches 0 to 0"),
        (["FOLDERS/words", "--sequence-length", "9999999"], "too few for a sequence of"),
        (["FOLDERS/words", "--json", "--verify"], "leave one of them out"),
        (["FOLDERS/words", "--step=-1"], "step: input should be greater than or equal to 0"),
        (["CONFIG", "--step", "10"], "--step is 10; the run has the steps 0 to 9"),
        (["CONFIG", "--stepz", "10"], "stepz: unknown key"),
        (["CONFIG", "--model.vocab_size", "258"], "the model's vocabulary of 258 is smaller"),
        ([], "CONFIG is missing"),
    ],
)
def test_what_cannot_be_shown_is_refused(capsys, folders, config, arguments, message):
    names = {"FOLDERS": str(folders), "CONFIG": str(config)}
    for name, value in names.items():
        arguments = [word.replace(name, value) for word in arguments]
    lines, error = refused(capsys, *arguments)
    assert message in error
    assert not lines


def test_a_folder_without_training_text_is_refused(capsys, folders, tmp_path):
    files = (str(folders / "talks.jsonl"),)
    held = PrepareSource(name="held", validation_files=files, format="chat")
    words = Tokenization(tokenizer=Path(folders / "model" / "tokenizer.json"))
    prepare(PrepareSettings(output=tmp_path, sources=(held,), **words.model_dump()))
    _, error = refused(capsys, tmp_path / "held")
    assert "has no tokens to train on" in error
