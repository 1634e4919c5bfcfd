"""Requests that a run's model cannot meet are refused before its weights are read."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.small_models import model_of

from geojax.cli.generate import GenerateCommand, _lines, _tokens_to_add
from geojax.cli.main import run as geojax
from geojax.data import Tokenizer
from geojax.errors import UserError
from geojax.inference import generation
from geojax.saved_runs import saved_run

WORDS = Tokenizer.train(["one two three"] * 9, vocabulary_size=270)
MODEL = model_of("llama").replace(vocab_size=300, max_position_embeddings=32)
RUN = SimpleNamespace(model=SimpleNamespace(base=MODEL), tokenizer=WORDS)


def tokens_to_add(prompt, **options):
    return _tokens_to_add(GenerateCommand(run=Path("run"), **options), RUN, [prompt])


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
