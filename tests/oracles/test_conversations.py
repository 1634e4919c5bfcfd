"""Tokens and masks of conversations, beside those of `apply_chat_template`."""

import json

import numpy as np
import pytest
import transformers
from support.chats import CHATML, TALKS, WITH_TAGS, write_tokenizer
from support.small_models import model_of

from geojax.data import PrepareSettings, Tokenizer, prepare
from geojax.data.templates.chat import ChatTemplate
from geojax.saved_runs.export import ExportedTokenizer


@pytest.mark.parametrize("template", [WITH_TAGS, CHATML])
@pytest.mark.parametrize("talk", TALKS)
def test_a_conversation_has_the_tokens_and_the_mask_of_transformers(tmp_path, talk, template):
    folder = write_tokenizer(tmp_path)
    (folder / "template.jinja").write_text(template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        talk, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    words = Tokenizer.load(folder / "tokenizer.json")
    ours = ChatTemplate.load(folder / "tokenizer.json", folder / "template.jinja")
    made = ours.conversation(talk, words)
    np.testing.assert_array_equal(made.ids, theirs["input_ids"])
    if template == WITH_TAGS:  # without the tag transformers marks nothing
        np.testing.assert_array_equal(made.of_assistant, theirs["assistant_masks"])


@pytest.mark.parametrize("given", [WITH_TAGS, None], ids=["a file", "beside the tokenizer"])
def test_an_exported_tokenizer_renders_what_the_run_trained_on(tmp_path, given):
    base, export, talks = (tmp_path / name for name in ("base", "export", "talks.jsonl"))
    for folder in (base, export):
        folder.mkdir()
    write_tokenizer(base)
    talks.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    template = None
    if given is not None:
        template = tmp_path / "other.jinja"
        template.write_text(given)
    (prepared,) = prepare(
        PrepareSettings(
            output=tmp_path / "prepared",
            sources=({"name": "talks", "files": (str(talks),), "format": "chat"},),
            tokenizer=base / "tokenizer.json",
            chat_template=template,
        )
    )
    words = ExportedTokenizer.read(prepared.tokenizer, [prepared.folder / "tokenizer.json"])
    words.write(export, model_of("llama"))
    theirs = transformers.AutoTokenizer.from_pretrained(export)
    assert theirs.special_tokens_map == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    rendered = [theirs.apply_chat_template(talk)["input_ids"] for talk in TALKS]
    stream = prepared.stream("train")
    trained = prepared.window("train", 0, len(stream)).tokens
    assert trained.tolist() == [token for talk in rendered for token in talk]
    ends = [theirs.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>")]
    assert words.token_ids == {"bos_token_id": ends[0], "eos_token_id": ends}


def test_data_of_two_templates_are_exported_without_one(tmp_path):
    files, lines = [], []
    for name, source in (("one", CHATML), ("two", WITH_TAGS)):
        folder = tmp_path / name
        folder.mkdir()
        files.append(write_tokenizer(folder) / "tokenizer.json")
        (folder / "chat_template.jinja").write_text(source)
    words = Tokenizer.load(files[0])
    assert ExportedTokenizer.read(words, files[:1], lines.append).template.source == CHATML
    assert lines == []
    assert ExportedTokenizer.read(words, files, lines.append).template is None
    (line,) = lines
    names = " and ".join(str(path.with_name("chat_template.jinja")) for path in files)
    assert line == f"no chat template is written: {names} differ"
