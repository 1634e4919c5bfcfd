"""The chat template beside a tokenizer.json, in the files that `transformers` reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from geojax.json_file import load_json, load_text

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
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
    """Read a template file, or the template that lies beside a tokenizer.json.

    Args:
        tokenizer: the tokenizer.json; tokenizer_config.json beside it names the special tokens.
        given: file of the template; None: chat_template.jinja beside the tokenizer, or what
            tokenizer_config.json holds.

    Returns:
        The template, of several the default one, or None where there is none.

    Raises:
        UserError: a file cannot be read.
    """
    config_path = tokenizer.parent / TOKENIZER_CONFIG
    config = load_json(config_path) if config_path.is_file() else {}
    tokens = _special_tokens(config)
    beside = tokenizer.parent / TEMPLATE_FILE
    path = given or (beside if beside.is_file() else None)
    if path is not None:
        return TemplateText(load_text(path, _MOST_BYTES), tokens, str(path))
    found = config.get("chat_template")
    if isinstance(found, list):
        of_name = {each.get("name"): each for each in found if isinstance(each, dict)}
        found = of_name.get("default", {}).get("template")
    if not isinstance(found, str):
        return None
    return TemplateText(found, tokens, f"{config_path}, chat_template")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str) and text:
            tokens[key] = text
    return tokens
