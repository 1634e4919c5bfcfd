"""Templates in a tokenizer's folder, in each of the files that `transformers` reads."""

import json

import pytest

from geojax.data.templates.chat import ChatTemplate
from geojax.data.templates.template_files import distinct_templates, read_template
from geojax.errors import UserError


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def named(*names):
    return [{"name": name, "template": f"of {name}"} for name in names]


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"tokenizer_config.json": {"chat_template": "of config"}}, "of config"),
        ({"tokenizer_config.json": {"chat_template": named("rag", "default")}}, "of default"),
        ({"chat_template.json": {"chat_template": "of json"}}, "of json"),
        (
            {"chat_template.jinja": "of jinja", "chat_template.json": {"chat_template": "x"}},
            "of jinja",
        ),
        (
            {
                "chat_template.json": {"chat_template": "a"},
                "tokenizer_config.json": {"chat_template": "b"},
            },
            "a",
        ),
    ],
)
def test_a_template_is_found_by_folder_and_by_file(tmp_path, files, source):
    for name, content in files.items():
        write(tmp_path, name, content)
    write(tmp_path, "tokenizer.json", "{}")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        template = read_template(path)
        assert template is not None
        assert template.source == source
    assert len(distinct_templates([tmp_path, tmp_path / "tokenizer.json"])) == 1


def test_special_tokens_come_from_the_config_then_from_their_map(tmp_path):
    write(tmp_path, "chat_template.jinja", "x")
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>"})
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    template = read_template(tmp_path)
    assert template is not None
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def test_named_templates_without_a_default_are_named(tmp_path):
    write(tmp_path, "tokenizer_config.json", {"chat_template": named("tool_use", "rag")})
    assert read_template(tmp_path) is None
    with pytest.raises(
        UserError, match="has the chat templates rag, tool_use, and none of the name"
    ):
        ChatTemplate.load(tmp_path, None)


def test_a_folder_without_a_template_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"neither chat_template.jinja nor .* is in it; name a temp"
    ):
        ChatTemplate.load(tmp_path, None)
