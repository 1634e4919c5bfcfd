"""A config may leave the vocabulary to its data."""

import pytest
from support.small_models import model_of
from support.small_runs import prepare_corpus

from geojax.config.run_config import RunConfig
from geojax.config.vocabulary import padding_note
from geojax.data import Prepared
from geojax.errors import UserError
from geojax.settings import validate

SIZES = model_of("llama").model_dump(exclude={"vocab_size"}, exclude_unset=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("texts"))


def config_of(model, data, **changes):
    content = {
        "run_directory": "run",
        "steps": 10,
        "model": model,
        "data": data,
        "batch": {"global_batch_size": 8, "sequence_length": 64},
    }
    return validate(RunConfig, content | changes, "run.yaml")


def prepared(folder):
    return {"sources": [{"name": "sums", "prepared": str(folder)}]}


@pytest.mark.parametrize("model", [SIZES, {"preset": "tiny", "vocab_size": None}])
def test_it_is_the_tokenizers_padded_and_on_every_mesh_the_same(folder, model):
    tokenizer = Prepared(folder).tokenizer
    assert 258 < tokenizer.vocabulary_size < 384
    for tensor in (1, 2):
        config = config_of(model, prepared(folder), mesh={"tensor": tensor})
        assert config.model.vocab_size == 384
    note = padding_note(config.model.vocab_size, tokenizer)
    assert note == f"vocabulary of 384, of which the tokenizer has {tokenizer.vocabulary_size}"
    assert padding_note(tokenizer.vocabulary_size, tokenizer) is None


def test_of_a_builtin_corpus_it_is_known_before_there_is_one(folder):
    assert config_of(SIZES, {"vocab_size": 5000}).model.vocab_size == 5120
    tokenizer = {"tokenizer": str(folder / "tokenizer.json")}
    assert config_of(SIZES, tokenizer).model.vocab_size == 384


def test_a_given_one_stays(folder):
    assert config_of("tiny", prepared(folder)).model.vocab_size == 4096
    assert config_of(SIZES | {"vocab_size": 301}, prepared(folder)).model.vocab_size == 301


def test_data_that_do_not_tell_it_are_named(tmp_path):
    message = r"model\.vocab_size is left out .*/nowhere: not prepared data .*; or give it$"
    with pytest.raises(UserError, match=message):
        config_of(SIZES, prepared("nowhere"))
    with pytest.raises(UserError, match=r"^run\.yaml: data: name at least one source$"):
        config_of(SIZES, {"sources": []})
