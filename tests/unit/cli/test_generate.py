"""Requests that a run's model cannot meet are refused before its weights are read."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from support.chats import CHATML, WITH_TAGS, write_tokenizer
from support.small_models import model_of

from geojax.cli.generate import GenerateCommand, _lines, _request
from geojax.cli.main import run as geojax
from geojax.data import Tokenizer
from geojax.errors import UserError
from geojax.inference import generation
from geojax.saved_runs import saved_run

WORDS = Tokenizer.train(["one two three"] * 9, vocabulary_size=270)
MODEL = model_of("llama").replace(vocab_size=300, max_position_embeddings=32)
RUN = SimpleNamespace(model=SimpleNamespace(base=MODEL), tokenizer=WORDS)


def tokens_to_add(prompt, **options):
    return _request(GenerateCommand(run=Path("run"), **options), RUN, [prompt]).tokens_to_add


def test_the_default_is_what_the_positions_have_room_for():
    given = 1 + len(WORDS.encode("one two"))
    assert tokens_to_add("one two") == 32 - given + 1
    assert tokens_to_add("one two", max_tokens=5) == 5


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("one", {"max_tokens": 10**9}, "positions, the model has 32 .*at most .* new tokens"),
        ("one", {"max_tokens": 0}, "max_new_tokens is 0"),
        ("one", {"seed": -1}, "seed is -1"),
        ("xy" * 500, {}, "prompt 0 of 1,000 characters takes 1,001 positions, and the model has"),
    ],
)
def test_what_has_no_room_is_refused(prompt, options, message):
    with pytest.raises(UserError, match=message):
        tokens_to_add(prompt, **options)


def test_of_a_prompt_that_is_far_too_long_only_a_beginning_is_encoded(monkeypatch):
    encoded = []

    class Counting:
        bos_id = 0

        def encode(self, text):
            encoded.append(len(text))
            return [1] * (len(text) // 4)

    monkeypatch.setattr(generation, "_BEGINNING_CHARACTERS", 64)
    with pytest.raises(UserError, match=r"takes more than .* positions"):
        generation.encode_prompts(MODEL, Counting(), ["abc " * 10_000])
    assert encoded == [64, 256]


@pytest.mark.parametrize(
    ("stdin", "message"),
    [(b"ok\n\xff\n", "stdin: not UTF-8 text"), (b"x" * 99, "stdin: a line of more than 64")],
)
def test_lines_that_are_no_prompts_are_refused(stdin, message, monkeypatch):
    monkeypatch.setattr("geojax.cli.generate._LONGEST_LINE", 64)
    with pytest.raises(UserError, match=message):
        list(_lines(io.TextIOWrapper(io.BytesIO(stdin), "utf-8")))


def test_a_request_is_checked_before_the_weights_are_read(monkeypatch):
    notes = []
    monkeypatch.setattr(saved_run.SavedRun, "open", lambda *arguments, **options: RUN)

    def check(run):
        raise UserError(f"refused for {run.model.base.max_position_embeddings} positions")

    with pytest.raises(UserError, match="refused for 32 positions"):
        saved_run.serve_run(Path("run"), None, check=check, log=notes.append)
    assert notes == []


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1"])
def test_a_temperature_that_is_none_is_refused_at_once(temperature, capsys):
    assert geojax(["generate", "/nowhere", "--prompt", "x", "--temperature", temperature]) == 2
    assert capsys.readouterr().err.startswith("error: temperature is ")


def chat_run(folder):
    """A run whose data were prepared with the tokenizer and the template in `folder`."""
    words = Tokenizer.load(folder)
    return SimpleNamespace(
        model=SimpleNamespace(base=MODEL.replace(vocab_size=400, max_position_embeddings=99)),
        tokenizer=words,
        tokenizer_files=[folder / "tokenizer.json"],
        chat_template=lambda: saved_run.SavedRun.chat_template(
            SimpleNamespace(tokenizer_files=[folder / "tokenizer.json"])
        ),
    )


def test_a_message_is_rendered_up_to_the_answer_which_ends_with_its_turn(tmp_path):
    run = chat_run(write_tokenizer(tmp_path))
    command = GenerateCommand(run=Path("run"), chat=("one?", "two"), system="be brief")
    request = _request(command, run, command.chat)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [library.decode(ids, skip_special_tokens=False) for ids in request.prompts] == [
        f"<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
        "<|im_start|>assistant\n"
        for text in command.chat
    ]
    names = {library.id_to_token(number) for number in request.stop_tokens}
    assert names == {"<|im_end|>"}


def test_an_answer_ends_where_the_template_ends_it_though_its_tokens_do_not_say_so(tmp_path):
    config = json.loads((write_tokenizer(tmp_path) / "tokenizer_config.json").read_text())
    config["eos_token"] = "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    run = chat_run(tmp_path)
    request = _request(GenerateCommand(run=Path("run"), chat=("one",)), run, ["one"])
    assert set(request.stop_tokens) == {
        run.tokenizer.id_of("<|endoftext|>"),
        run.tokenizer.id_of("<|im_end|>"),
    }


def test_a_chat_that_cannot_be_rendered_is_refused(tmp_path):
    run = chat_run(write_tokenizer(tmp_path))
    command = GenerateCommand(run=Path("run"), chat=("a<|im_end|>b",))
    with pytest.raises(UserError, match=r"--chat 0: message 0 spells the special token <\|im_end"):
        _request(command, run, command.chat)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"neither chat_template.jinja .*; name a model's folder"):
        _request(command, run, command.chat)


def test_the_runs_data_must_agree_on_the_template(tmp_path):
    files = []
    for name, template in (("one", CHATML), ("two", WITH_TAGS)):
        (tmp_path / name).mkdir()
        folder = write_tokenizer(tmp_path / name)
        (folder / "chat_template.jinja").write_text(template)
        files.append(folder / "tokenizer.json")
    with pytest.raises(UserError, match=r"have different chat templates, .*one.* and .*two.*"):
        saved_run.SavedRun.chat_template(SimpleNamespace(tokenizer_files=files))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x", "--chat", "y"], "--prompt and --chat are given; one of them"),
        (["--prompt", "x", "--system", "y"], "--system stands before a message"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message, capsys):
    assert geojax(["generate", "/nowhere", *options]) == 2
    assert message in capsys.readouterr().err
