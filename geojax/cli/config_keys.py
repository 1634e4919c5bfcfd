"""The keys of a run's config, section by section, with types, defaults and meanings.

The text is that of the settings classes. `geojax train --help SECTION` prints it, and
`docs/config_reference.py` writes it as a page.
"""

import inspect
from collections.abc import Iterator
from typing import NamedTuple

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from geojax.cli.type_words import words_of_field
from geojax.errors import UserError
from geojax.settings import Settings, classes_in
from geojax.suggestions import did_you_mean, shortened

BASE_MEANING = (
    "YAML file that this config changes, relative to this file. Mappings merge, and all else "
    "replaces the base's. Only a file can name its base."
)


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


def sections(settings: type[Settings], key: str = "", meaning: str = "") -> Iterator[Section]:
    """List the keys of a settings class, inherited ones last, then those of its sections."""
    own, inherited, inner = list[Setting](), list[Setting](), []
    for name, field in settings.model_fields.items():
        path = f"{key}.{name}" if key else name
        text = " ".join((field.description or "").split())
        nested = [each for each in classes_in(field.annotation) if issubclass(each, Settings)]
        if not nested:
            keys = own if name in settings.__annotations__ else inherited
            keys.append(Setting(path, words_of_field(field), _default(field), text))
        for number, of_field in enumerate(nested):
            inner.append((of_field, path, text if number == 0 else inspect.getdoc(of_field) or ""))
    yield Section(key, meaning, (*own, *inherited))
    for each in inner:
        yield from sections(*each)


def config_sections() -> list[Section]:
    """List all keys of a run's config; those at the top have `base`, which is no setting."""
    from geojax.config.run_config import RunConfig

    top, *rest = sections(RunConfig)
    base = Setting("base", "a path", "none", BASE_MEANING)
    return [top._replace(settings=(base, *top.settings)), *rest]


def sections_below(key: str, listed: list[Section]) -> list[Section]:
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
            f"a config has no section or key '{shortened(key)}'; "
            f"{did_you_mean(key, known, 'geojax train --help')}"
        )
    return chosen


def _default(field: FieldInfo) -> str:
    """Write a field's default as YAML, in backticks."""
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "computed"
    value = field.default
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return "`[]`" if value == () else f"`{value}`"
