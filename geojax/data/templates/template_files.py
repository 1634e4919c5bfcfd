"""The chat template beside a tokenizer or in its folder, in the files that `transformers` reads."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from geojax.json_file import load_json, load_text

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE_JSON = "chat_template.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_DEFAULT = "default"
_MOST_BYTES = 1 << 20
"""Most bytes of a template's file."""


class TemplateText(NamedTuple):
    """A chat template that has been read, and not yet compiled."""

    source: str
    """The template, in Jinja."""
    special_tokens: dict[str, str]
    """Special tokens that the template may name, by key such as "bos_token"."""
    name: str
    """Name of the template in messages."""

    def renders_as(self, other: "TemplateText") -> bool:
        """Return True if both render every conversation alike."""
        return self[:2] == other[:2]

    def write(self, folder: Path) -> None:
        """Write the files from which `read_template` reads it again, beside a tokenizer.json."""
        (folder / TEMPLATE_FILE).write_text(self.source, encoding="utf-8")
        tokens = json.dumps(self.special_tokens, indent=1) + "\n"
        (folder / TOKENIZER_CONFIG).write_text(tokens, encoding="utf-8")


def read_template(tokenizer: Path, given: Path | None = None) -> TemplateText | None:
    """Read a template file, or the template of a tokenizer.

    Args:
        tokenizer: the tokenizer's file or folder; tokenizer_config.json in the same folder names
            the special tokens.
        given: file of the template; None: chat_template.jinja or chat_template.json in the
            tokenizer's folder, or what tokenizer_config.json holds.

    Returns:
        The template, of several the default one, or None where there is none.

    Raises:
        UserError: a file cannot be read.
    """
    folder = _folder(tokenizer)
    config = _json_if_there(folder / TOKENIZER_CONFIG)
    tokens = _special_tokens({**_json_if_there(folder / _SPECIAL_TOKENS), **config})
    beside = folder / TEMPLATE_FILE
    path = given or (beside if beside.is_file() else None)
    if path is not None:
        return TemplateText(load_text(path, _MOST_BYTES), tokens, str(path))
    for name, settings in ((_TEMPLATE_JSON, None), (TOKENIZER_CONFIG, config)):
        held = settings if settings is not None else _json_if_there(folder / name)
        source = _named_templates(held).get(_DEFAULT)
        if source is not None:
            return TemplateText(source, tokens, f"{folder / name}, chat_template")
    return None


def missing_template(tokenizer: Path) -> str:
    """Say why `read_template` finds nothing, in the words of an error."""
    folder = _folder(tokenizer)
    names = _named_templates(_json_if_there(folder / TOKENIZER_CONFIG))
    if names:
        return (
            f"{folder / TOKENIZER_CONFIG}: has the chat templates {', '.join(sorted(names))}, and "
            f"none of the name {_DEFAULT}"
        )
    where = "is in it" if tokenizer == folder else "lies beside it"
    return f"{tokenizer}: neither {TEMPLATE_FILE} nor a chat_template in {TOKENIZER_CONFIG} {where}"


def distinct_templates(tokenizers: Iterable[Path]) -> list[TemplateText]:
    """Read the templates of several tokenizers; of those that render alike, the first.

    Raises:
        UserError: a file cannot be read.
    """
    distinct: list[TemplateText] = []
    for template in map(read_template, tokenizers):
        if template is not None and not any(template.renders_as(other) for other in distinct):
            distinct.append(template)
    return distinct


def _folder(tokenizer: Path) -> Path:
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def _json_if_there(path: Path) -> dict[str, Any]:
    return load_json(path) if path.is_file() else {}


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates that a file holds by name; a single one is the default."""
    found = config.get("chat_template")
    if isinstance(found, str):
        return {_DEFAULT: found}
    entries = found if isinstance(found, list) else []
    named = {
        entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)
    }
    return {
        name: source
        for name, source in named.items()
        if isinstance(name, str) and isinstance(source, str)
    }


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str) and text:
            tokens[key] = text
    return tokens
