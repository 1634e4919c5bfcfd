"""A run's whole config as YAML, with the source of each value beside it."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from geojax.cli.help_pages import terminal_width
from geojax.config.run_config import RunConfig
from geojax.config.written_config import WrittenConfig, written_config
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.models.huggingface.checkpoint import read_model_fields
from geojax.origins import KeyPath
from geojax.paths import resolved_path, shown_path
from geojax.yaml_syntax import Dumper, one_line

_COLUMN = 36
"""Column in which comments begin."""

_ABSENT = object()


def sourced_config(path: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a config: each value with a comment that names its source.

    Raises:
        UserError: the config has mistakes.
    """
    written = written_config(path, overrides)
    config = RunConfig.of_written(written)
    sources = _Sources(written, config)
    values = _with_short_paths(config.model_dump(mode="json"), config.model_dump())
    yield from _lines(values, sources, ())


class _Sources:
    """The sources of a config's values."""

    def __init__(self, written: WrittenConfig, config: RunConfig):
        self._written = written
        self._model, self._model_source = _model_of(written.content.get("model"))
        self._resolved = _resolved_layout(config)

    def of(self, path: KeyPath, value: Any) -> str:
        """Name the source of the value at a key path."""
        source = self._named(path)
        resolved = _at(self._resolved, path)
        if value == "auto" and resolved not in (_ABSENT, "auto"):
            source += f"; here {one_line(resolved)}"
        return source

    def _named(self, path: KeyPath) -> str:
        if _at(self._written.content, path) is not _ABSENT:
            return str(self._written.origins.of(path))
        if path[0] == "model" and _at(self._model, path[1:]) is not _ABSENT:
            return self._model_source
        if path == ("model", "vocab_size"):
            return "from the data's tokenizer"
        return "default"


def _with_short_paths(plain: Any, values: Any) -> Any:
    """Return plain values with paths below the current folder relative to it."""
    if isinstance(values, Path):
        return shown_path(values)
    if isinstance(values, Mapping):
        return {name: _with_short_paths(plain[name], value) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return [_with_short_paths(*pair) for pair in zip(plain, values, strict=True)]
    return plain


def _model_of(model: Any) -> tuple[Mapping[str, Any], str]:
    """Return the fields that a config's model has from elsewhere, and their source."""
    if isinstance(model, str):
        model = {"preset": model}
    if isinstance(model, Mapping) and "preset" in model:
        name = model["preset"]
        return ModelConfig.load(name).model_dump(exclude_unset=True), f"preset {name}"
    if isinstance(model, Mapping) and "huggingface" in model:
        folder = resolved_path(model["huggingface"])
        return read_model_fields(folder), f"{model['huggingface']}/config.json"
    return {}, ""


def _resolved_layout(config: RunConfig) -> Mapping[str, Any]:
    """Return the layout without "auto" as a run would have it; empty where only a run can tell."""
    from geojax.planner.resolve.choices import resolved_plan
    from geojax.planner.resolve.traced_run import abstract_run_mesh

    if config.dc.join == "islands":
        return {}
    try:
        plan = resolved_plan(config, abstract_run_mesh(config))
    except UserError:
        return {}
    return plan.layout.model_dump(mode="json")


def _lines(values: Mapping[str, Any], sources: _Sources, path: KeyPath) -> Iterator[str]:
    indent = "  " * len(path)
    for name, value in values.items():
        below = (*path, name)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, sources, below)
            continue
        comment = f"# {sources.of(below, value)}"
        first, *rest = _dumped(name, value, terminal_width() - len(indent))
        line = f"{f'{indent}{first}':{_COLUMN}}  "
        if rest or len(line) + len(comment) > terminal_width():
            yield from textwrap.wrap(
                comment,
                terminal_width(),
                initial_indent=indent,
                subsequent_indent=f"{indent}# ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            yield line.rstrip()
        else:
            yield f"{line}{comment}"
        yield from (f"{indent}{each}" for each in rest)


def _dumped(name: str, value: Any, width: int) -> list[str]:
    """Return the lines of a key with its value."""
    text: str = yaml.dump(
        {name: value}, None, Dumper, allow_unicode=True, width=width, sort_keys=False
    )
    return text.splitlines()


def _at(values: Any, path: KeyPath) -> Any:
    """Return the value at a key path."""
    for part in path:
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        else:
            return _ABSENT
    return values
