"""Write docs/config-reference.md: every key of a run's config, its type, default and meaning.

    python docs/config_reference.py

The text is that of the settings classes, so that the page cannot say anything else than the code; a
test fails when the committed page is not what this writes.
"""

import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pydantic
from pydantic_core import PydanticUndefined

from geojax.settings import Settings
from geojax.train.config import RunConfig

PAGE = Path(__file__).resolve().parent / "config-reference.md"
OPENING = """# Config reference

Every key of the YAML file that `geojax train`, `memory`, `simulate` and `probe` read, and of
`--section.key value` on their command lines. Written by `python docs/config_reference.py` from the
settings classes.
"""


def section_of(annotation: object) -> type[Settings] | None:
    """The settings class in an annotation, if it is one or may be one."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Settings):
            return candidate
    return None


def type_name(annotation: object) -> str:
    """An annotation as a person writes it in YAML."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (tuple, list):
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    names = {type(None): "null", str: "text", Path: "path", bool: "true or false", int: "integer"}
    names |= {float: "number"}
    if isinstance(annotation, type):
        return names.get(annotation, annotation.__name__)
    return str(annotation)


def default_of(field: pydantic.fields.FieldInfo) -> str:
    """A field's default as YAML."""
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "computed"
    value = field.default
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return "`[]`" if value == () else f"`{value}`"


def sections(settings: type[Settings], prefix: str = "") -> Iterator[str]:
    """The tables of a settings class and of the sections inside it."""
    rows, inner = [], []
    for name, field in settings.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            inner.append((f"{prefix}{name}", section, field.description or ""))
            continue
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {type_name(field.annotation)} | {default_of(field)} | {text} |")
    if rows:
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
    for path, section, description in inner:
        yield f"## `{path}`\n\n{' '.join(description.split())}\n"
        yield from sections(section, f"{path}.")


def page() -> str:
    """The whole page."""
    return "\n".join([OPENING, *sections(RunConfig)])


if __name__ == "__main__":
    PAGE.write_text(page())
