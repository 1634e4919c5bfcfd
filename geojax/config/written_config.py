"""A run's config as it is written: a file on top of its bases, and options that override both.

    base: common.yaml        # beside this file; mappings merge, and all else replaces the base's
    batch: {microbatches: 8}

Nothing is validated here, and no module that this one imports needs JAX.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from geojax.errors import UserError
from geojax.origins import KeyPath, Origins, ValuePlace
from geojax.paths import expanded_path
from geojax.settings import load_with_origins
from geojax.suggestions import shortened
from geojax.yaml_syntax import YamlError, parse

MOST_BASES = 8
"""Most files that a config stands on."""

_WHOLE_MODELS = ("preset", "huggingface", "module")
"""Keys of a `model` that say what it is, so that it does not change the base's."""


class WrittenConfig(NamedTuple):
    """The values of a config, and where they were written."""

    content: dict[str, Any]
    origins: Origins


def written_config(path: Path, overrides: Sequence[str] = ()) -> WrittenConfig:
    """Read a config file on top of its bases, and apply `--dotted.name value` overrides.

    Raises:
        UserError: a file cannot be read, its bases never end, or an override has no place.
    """
    written = _composed(path, ())
    for name, value in _parse_overrides(overrides):
        _override(written, name, value)
    return written


def _composed(path: Path, above: tuple[Path, ...]) -> WrittenConfig:
    """Read the file at `path`, which is a base of the files `above`, on top of its own base."""
    written = WrittenConfig(*load_with_origins(path))
    if "base" not in written.content:
        return written
    place, named = written.origins.of(("base",)), written.content.pop("base")
    if not isinstance(named, str):
        raise UserError(f"{place}: base: expected the path of a YAML file")
    chain = (*above, path)
    try:
        base = path.parent / expanded_path(named)
    except UserError as error:
        raise UserError(f"{place}: base: {error}") from None
    if any(_same_file(base, each) for each in chain):
        names = " -> ".join(each.name for each in (*chain, base))
        raise UserError(
            f"{place}: base: a file stands on itself ({shortened(names, 200)}); leave one base out"
        )
    if len(chain) > MOST_BASES:
        raise UserError(f"{place}: base: is number {len(chain)}; up to {MOST_BASES} would do")
    try:
        below = _composed(base, chain)
    except UserError as error:
        if str(error).startswith(f"{base}: "):  # of the file as a whole
            raise UserError(f"{place}: base: {error}") from None
        raise
    return _merged(below, written)


def _same_file(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _merged(base: WrittenConfig, changes: WrittenConfig) -> WrittenConfig:
    """Return a base with the values of the file that stands on it."""
    model = changes.content.get("model")
    if isinstance(model, Mapping) and model.keys().isdisjoint(_WHOLE_MODELS):
        _name_preset(base)
    content = _merged_mappings(base.content, changes.content)
    places, there = base.origins.places | changes.origins.places, set(_key_paths(content))
    places = {key: place for key, place in places.items() if key in there}
    return WrittenConfig(content, Origins(changes.origins.source, places))


def _name_preset(written: WrittenConfig) -> None:
    """Write a model that is the name of a preset as a mapping, which changes can be put into."""
    content, origins = written
    if isinstance(content.get("model"), str):
        content["model"] = {"preset": content["model"]}
        origins.places["model", "preset"] = origins.of(("model",))


def _merged_mappings(
    base: Mapping[str, Any], changes: Mapping[str, Any], is_model: bool = False
) -> dict[str, Any]:
    if is_model and not changes.keys().isdisjoint(_WHOLE_MODELS):
        return dict(changes)
    merged = dict(base)
    for key, value in changes.items():
        known = base.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            merged[key] = _merged_mappings(known, value, key == "model")
        else:
            merged[key] = value
    return merged


def _key_paths(content: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the key paths of all values in a config."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, Mapping):
        parts = content.items()
    elif isinstance(content, list):
        parts = enumerate(content)
    for name, value in parts:
        yield (*path, str(name))
        yield from _key_paths(value, (*path, str(name)))


def _parse_overrides(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """`--a.b 1 --c=x` as [("a.b", 1), ("c", "x")]; values are read as YAML."""
    pairs, remaining = [], list(arguments)
    while remaining:
        name, equals, value = remaining.pop(0).partition("=")
        if not name.startswith("--") or not name[2:]:
            raise UserError(f"'{name}': expected an override such as --optimizer.warmup_steps 50")
        if not equals:
            if not remaining:
                raise UserError(f"{name}: a value is missing")
            value = remaining.pop(0)
        try:
            parsed = parse(value)
        except YamlError as error:
            raise UserError(
                f"{name}: '{shortened(value)}' is not a valid YAML value ({error})"
            ) from None
        if parsed is None and value.strip().lower() not in ("null", "~"):
            raise UserError(f"{name}: its value is empty; null or '\"\"' would be one")
        pairs.append((name[2:].replace("-", "_"), parsed))
    return pairs


def _override(written: WrittenConfig, name: str, value: Any) -> None:
    """Put `value` in the place of a config that is called `name`: data.sources.0.prepared, say."""
    content, origins = written
    if name == "base":
        raise UserError("--base: only a file names its base; write base: in CONFIG")
    if isinstance(content.get("model"), str) and name.startswith("model."):
        _name_preset(written)
    *parents, last = name.split(".")
    group: Any = content
    for depth, parent in enumerate(parents):
        place = _place(group, parent, name)
        inner = group.setdefault(place, {}) if isinstance(group, dict) else group[place]
        if not isinstance(inner, dict | list):
            path = ".".join(parents[: depth + 1])
            raise UserError(f"--{name}: '{path}' is not a group of settings in the config file")
        group = inner
    group[_place(group, last, name)] = value
    shown = ".".join(shortened(part) for part in name.split("."))
    origins.replace(tuple(name.split(".")), ValuePlace(f"--{shown}"))


def _place(group: dict[str, Any] | list[Any], part: str, name: str) -> Any:
    """Return the key or the index of `part`, a part of the override `name`, in a group."""
    if isinstance(group, dict):
        return part
    if not (part.isascii() and part.isdecimal() and len(part) < 9 and int(part) < len(group)):
        raise UserError(
            f"--{name}: '{part}' is no place in a list of {len(group)}, counted from 0; give the "
            "whole list as YAML to change it"
        )
    return int(part)
