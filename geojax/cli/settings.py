"""`geojax settings [SECTION]`: the settings of a config file, with types, defaults and meanings.

The text is that of the settings classes; `docs/config_reference.py` writes it as a page.
"""

import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from geojax.errors import UserError
from geojax.settings import Settings, classes_in
from geojax.suggestions import did_you_mean, shortened

_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class SettingsCommand:
    """List the settings of a config file: type, default and meaning of each."""

    section: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="SECTION")] = None
    """Section (optimizer) or key (optimizer.peak_learning_rate) to list; default: all."""


class Setting(NamedTuple):
    """One key of a config file."""

    key: str
    """Dotted, as on the command line."""
    type: str
    default: str
    """YAML, "required" or "computed"."""
    meaning: str


class Section(NamedTuple):
    """Keys that stand next to each other."""

    key: str
    """Dotted; empty for those at the top."""
    meaning: str
    settings: tuple[Setting, ...]


def run(command: SettingsCommand) -> int:
    """Print the settings and return the exit code 0."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    from geojax.config.run_config import RunConfig

    listed = list(sections(RunConfig))
    if command.section is not None:
        listed = _below(command.section, listed)
    print("\n".join(line for section in listed for line in _lines(section)))
    return 0


def sections(settings: type[Settings], key: str = "", meaning: str = "") -> Iterator[Section]:
    """List the keys of a settings class, inherited ones last, then those of its sections."""
    own, inherited, inner = list[Setting](), list[Setting](), []
    for name, field in settings.model_fields.items():
        path = f"{key}.{name}" if key else name
        text = " ".join((field.description or "").split())
        nested = [each for each in classes_in(field.annotation) if issubclass(each, Settings)]
        if not nested:
            keys = own if name in settings.__annotations__ else inherited
            keys.append(Setting(path, _type_name(field.annotation), _default(field), text))
        for number, of_field in enumerate(nested):
            inner.append((of_field, path, text if number == 0 else inspect.getdoc(of_field) or ""))
    yield Section(key, meaning, (*own, *inherited))
    for each in inner:
        yield from sections(*each)


def _below(key: str, listed: list[Section]) -> list[Section]:
    """Return what is called `key` or stands in it.

    Raises:
        UserError: nothing is; the message names the nearest.
    """
    chosen = [each for each in listed if f"{each.key}.".startswith(f"{key}.")]
    named = [setting for each in listed for setting in each.settings]
    if not chosen:
        chosen = [Section("", "", (each,)) for each in named if each.key == key]
    if not chosen:
        known = [*(each.key for each in listed if each.key), *(each.key for each in named)]
        raise UserError(
            f"geojax settings: there is no '{shortened(key)}'; "
            f"{did_you_mean(key, known, 'geojax settings')}"
        )
    return chosen


def _lines(section: Section) -> Iterator[str]:
    if section.key:
        yield from textwrap.wrap(f"{section.key}: {section.meaning}", _WIDTH)
    for setting in section.settings:
        yield f"  --{setting.key}  {setting.type}  ({setting.default})".replace("`", "")
        indent = " " * 6
        yield from textwrap.wrap(
            setting.meaning, _WIDTH, initial_indent=indent, subsequent_indent=indent
        )
    yield ""


def _type_name(annotation: object) -> str:
    """Name a type as a person says it who writes YAML; values stand in backticks."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (tuple, list):
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    names = {type(None): "null", str: "text", Path: "path", bool: "true or false", int: "integer"}
    names |= {float: "number"}
    if isinstance(annotation, type):
        return names.get(annotation, annotation.__name__)
    return str(annotation)


def _default(field: FieldInfo) -> str:
    """Write a field's default as YAML, in backticks."""
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "computed"
    value = field.default
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return "`[]`" if value == () else f"`{value}`"
