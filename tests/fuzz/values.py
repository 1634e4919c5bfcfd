"""Hostile values for a field, by its type and its bounds."""

import random
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import annotated_types
import pydantic

from geojax.settings import Settings

ANYTHING = (
    "0b_",
    "2024-13-45",
    "!!float x",
    "!!int ''",
    "!!bool maybe",
    "!!binary '='",
    ".inf",
    "-.inf",
    ".nan",
    "1e400",
    "-1",
    "0",
    "-0.0",
    "1e30",
    "1e19",
    "1e-300",
    "99999999999999999999",
    "1e8",
    "100000000",
    "1000000000",
    "0x7fffffffffffffff",
    "1e99999999s",
    "1" * 5000,
    "0x" + "f" * 5000,
    "true",
    "no",
    "null",
    "~",
    '""',
    r'"\0"',
    r'"\ud800"',
    r'"\U00110000"',
    "[]",
    "{}",
    "[[]]",
    "[" * 300,
    "[" * 100_000,
    "{a: {b: {c: 1}}}",
    "*a",
    "&a [*a]",
    "&a {b: *a}",
    "'1e8'",
    "x" * 300,
    "x" * 20_000,
    "'a\nb'",
    '"a\\nb"',
    "\N{PILE OF POO}",
    "/dev/zero/x",
    "/proc/nope/x",
    "fifo",
    "..",
    "/dev/zero",
    "/dev/full",
    "folder",
    "empty.yaml",
    "gs://bucket/x",
    "s3://bucket/x",
    "- a",
    "? a",
    "a: b: c",
    "%",
    "@",
    "`",
    "!!python/object:os.system x",
    "21ms",
    "-21ms",
    "80GB",
    "1e30GB",
    "1.5B",
    "1PFLOP/s",
    "9" * 39 + "e99s",
    "1" * 40 + "GB/s",
    "50%",
    "1:30",
    "1_000",
    "0o17",
    "٣",
)
"""YAML scalars and fragments that some part of a reader may choke on."""


class Field(NamedTuple):
    """A key of a config, and what may be its value."""

    path: tuple[str, ...]
    annotation: Any
    metadata: tuple[Any, ...]


def fields_of(settings: type[Settings], path: tuple[str, ...] = ()) -> Iterator[Field]:
    """Yield every key of a settings class and of those inside it."""
    for name, field in settings.model_fields.items():
        here = (*path, name)
        inner = next(_settings_in(field.annotation), None)
        if inner is not None:
            yield from fields_of(inner, here)
        yield Field(here, field.annotation, tuple(field.metadata))


def hostile(field: Field, rng: random.Random) -> tuple[str, bool]:
    """Draw a value for `field` as YAML, and tell whether no reader may accept it."""
    lower, upper = _bounds(field.annotation, field.metadata)
    numbers = list(_numbers(field.annotation))
    choice = rng.random()
    if numbers and choice < 0.35 and upper is not None:
        factor = rng.choice([1.000001, 2, 1e3, 1e8, 1e300])
        value = upper * factor + 1
        text = str(int(value)) if int in numbers and value < 1e30 else repr(float(value))
        return text, True
    if numbers and choice < 0.55 and lower is not None:
        value = lower - rng.choice([1 if int in numbers else 1e-9, 1, 1e8, 1e300])
        return (str(int(value)) if int in numbers and abs(value) < 1e30 else repr(value)), True
    if numbers and choice < 0.7:
        edge = [bound for bound in (lower, upper) if bound is not None] or [1]
        near = rng.choice(edge)
        return str(int(near) if int in numbers else near), False
    if numbers and choice < 0.8:
        return rng.choice(["true", "[1]", "{a: 1}", "x", '"\\0"', ".nan", "0b_"]), True
    return rng.choice(ANYTHING), False


def _settings_in(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, Settings):
            yield annotation
        return
    if typing.get_origin(annotation) not in (tuple, list, dict):
        for inner in typing.get_args(annotation):
            yield from _settings_in(inner)


def _numbers(annotation: Any) -> Iterator[type]:
    """Yield int and float where a bare number may stand."""
    if annotation in (int, float):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for inner in typing.get_args(annotation):
            yield from _numbers(inner)


def _bounds(annotation: Any, metadata: tuple[Any, ...]) -> tuple[float | None, float | None]:
    lower = upper = None
    for each in _constraints(annotation, metadata):
        if isinstance(each, annotated_types.Ge | annotated_types.Gt):
            lower = each.ge if isinstance(each, annotated_types.Ge) else each.gt
        if isinstance(each, annotated_types.Le | annotated_types.Lt):
            upper = each.le if isinstance(each, annotated_types.Le) else each.lt
    return lower, upper


def _constraints(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[Any]:
    for each in metadata:
        if isinstance(each, pydantic.fields.FieldInfo):
            yield from each.metadata
        yield each
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        yield from _constraints(inner, tuple(more))
    elif origin in (typing.Union, types.UnionType):
        for inner in typing.get_args(annotation):
            yield from _constraints(inner, ())
