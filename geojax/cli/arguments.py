"""Subcommands as classes: a dataclass, or a `Settings` class where numbers have bounds.

Tyro reads the arguments of both. It would turn an error of a constructor into a box of its own, so
it only collects those of a `Settings` class, which `geojax.settings.validate` then checks.
"""

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import pydantic
import tyro
from pydantic.fields import FieldInfo
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from geojax.settings import Settings

REGISTRY = ConstructorRegistry()
"""The rule by which tyro collects the arguments of a `Settings` class."""

ArgumentMark = type(tyro.conf.arg())


class UncheckedArguments(NamedTuple):
    """The arguments of a subcommand, not yet validated."""

    settings: type[Settings]
    values: dict[str, Any]


class Argument(NamedTuple):
    """An argument of a subcommand."""

    field: str
    """Field of the subcommand's class."""
    name: str
    """Name of the option, with underscores."""
    is_required: bool
    may_stand_alone: bool
    """True if it need not have a value."""


def arguments_of(command: type[Any]) -> Iterator[Argument]:
    """Yield the arguments of a subcommand's class; a group without a name counts by its own."""
    hints = typing.get_type_hints(command, include_extras=True)
    for field, is_required in fields_of(command):
        annotation = hints[field]
        metadata = getattr(annotation, "__metadata__", ())
        marks: list[Any] = [each for each in metadata if type(each) is ArgumentMark]
        names = [mark.name for mark in marks if mark.name is not None]
        if names == [""]:
            yield from arguments_of(typing.get_args(annotation)[0])
            continue
        yield Argument(
            field, names[0] if names else field, is_required, _may_stand_alone(annotation)
        )


def _may_stand_alone(annotation: Any) -> bool:
    """Tell a flag, or a list that is None if its option is absent."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    members = typing.get_args(annotation)
    lists = [each for each in members if typing.get_origin(each) is tuple]
    return annotation is bool or (bool(lists) and types.NoneType in members)


def fields_of(command: type[Any]) -> Iterator[tuple[str, bool]]:
    """Yield the name of each field, and True if an instance cannot be had without it."""
    if issubclass(command, Settings):
        for name, field in command.model_fields.items():
            yield name, field.is_required()
        return
    for each in dataclasses.fields(command):
        defaults = (each.default, each.default_factory)
        yield each.name, all(default is dataclasses.MISSING for default in defaults)


@REGISTRY.struct_rule
def _collect(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Let tyro collect the arguments of a `Settings` class instead of making one."""
    settings = info.type
    if not isinstance(settings, type) or not issubclass(settings, Settings):
        return None
    hints = typing.get_type_hints(settings, include_extras=True)
    fields = []
    # Inherited options last.
    names = sorted(settings.model_fields, key=lambda name: name not in settings.__annotations__)
    for name in names:
        field = settings.model_fields[name]
        written = _as_written(hints[name])
        meaning = " ".join((field.description or "").split())
        fields.append(StructFieldSpec(name, written, _default(field, written), meaning))

    def collect(**values: Any) -> UncheckedArguments:
        return UncheckedArguments(settings, values)

    collect.__doc__ = settings.__doc__
    return StructConstructorSpec(collect, tuple(fields))


def _as_written(annotation: Any) -> Any:
    """Return the type by which tyro reads a value: text for a quantity, which may have a unit."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner, *metadata = arguments
        has_unit = any(isinstance(each, pydantic.BeforeValidator) for each in metadata)
        inner = str if has_unit and inner in (int, float) else _as_written(inner)
        marks = [each for each in metadata if type(each).__module__.startswith("tyro.")]
        return Annotated[(inner, *marks)] if marks else inner
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(_as_written, arguments))
    if origin is tuple:
        return types.GenericAlias(tuple, tuple(map(_as_written, arguments)))
    return annotation


def _default(field: FieldInfo, written: Any) -> Any:
    if field.is_required():
        return tyro.MISSING_NONPROP
    default = field.get_default(call_default_factory=True)
    return f"{default:g}" if written is str and isinstance(default, float) else default
