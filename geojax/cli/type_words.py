"""Types of settings and options in the words of a person who writes YAML; values in backticks."""

import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic.fields import FieldInfo

from geojax.quantities import InWords

_WORDS: dict[type, str] = {
    str: "text",
    Path: "a path",
    int: "a whole number",
    float: "a number",
    dict: "a mapping",
}
_PLURALS = {
    "text": "texts",
    "a path": "paths",
    "a whole number": "whole numbers",
    "a number": "numbers",
    "a mapping": "mappings",
}


def words_of_field(field: FieldInfo) -> str:
    """Name the type of a setting: `auto` or a whole number."""
    marks = [mark.words for mark in field.metadata if isinstance(mark, InWords)]
    return marks[0] if marks else in_words(field.annotation)


def in_words(annotation: Any, *, may_be_absent: bool = False) -> str:
    """Name a type: text, a path, `a` or `b`, a list of whole numbers.

    Args:
        annotation: the type.
        may_be_absent: None is no value but the absence of one, and is not named.
    """
    parts = list(dict.fromkeys(_parts(annotation)))
    if may_be_absent:
        parts = [part for part in parts if part != "`null`"]
    return alternatives(sorted(parts, key=_order))


def alternatives(parts: Iterable[str]) -> str:
    """Join parts of a sentence: a, b or c."""
    *first, last = parts
    return f"{', '.join(first)} or {last}" if first else last


def _order(part: str) -> int:
    return {"`auto`": 0, "`null`": 2}.get(part, 1)


def _parts(annotation: Any) -> Iterator[str]:
    """Yield the names of what a value may be."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        marks = [mark.words for mark in arguments[1:] if isinstance(mark, InWords)]
        yield from marks or _parts(arguments[0])
    elif origin is typing.Literal:
        yield from (f"`{value}`" for value in arguments)
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _parts(argument)
    elif origin in (tuple, list):
        item = in_words(arguments[0])
        plural = _PLURALS.get(item, f"values: {item}")
        count = "" if Ellipsis in arguments or origin is list else f"{len(arguments)} "
        yield f"a list of {count}{plural}"
    elif annotation is bool:
        yield from ("`true`", "`false`")
    elif annotation in (None, type(None)):
        yield "`null`"
    elif isinstance(origin or annotation, type) and issubclass(
        origin or annotation, pydantic.BaseModel
    ):
        yield "a mapping"
    else:
        yield _WORDS.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))
