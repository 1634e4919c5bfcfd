"""Every number that comes from outside has a smallest and a largest value."""

import importlib
import pkgutil
import types
import typing

import annotated_types
import pydantic

import geojax
from geojax.settings import Settings

NOT_READ = {"geojax.probe.figures"}
"""Modules whose classes are results that geojax writes and never reads."""
NEED_EXTRAS = {"geojax.inference.harness"}
"""Modules that cannot be imported without an extra; they have no settings."""


def settings_classes():
    """Every settings class of the package."""
    for module in pkgutil.walk_packages(geojax.__path__, "geojax."):
        if not module.name.endswith("__main__") and module.name not in NEED_EXTRAS:
            importlib.import_module(module.name)
    found, open_classes = {}, [Settings]
    while open_classes:
        for each in open_classes.pop().__subclasses__():
            if each.__module__.startswith("geojax.") and each.__module__ not in NOT_READ:
                found[f"{each.__module__}.{each.__name__}"] = each
            open_classes.append(each)
    return found


def numbers(annotation, metadata=()):
    """Each int or float in an annotation, with the constraints on it."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        yield from numbers(inner, (*metadata, *more))
    elif annotation in (int, float):
        yield metadata
    elif origin is not typing.Literal:
        union = origin in (typing.Union, types.UnionType)
        for inner in typing.get_args(annotation):
            yield from numbers(inner, metadata if union else ())


def sides(metadata):
    """The sides on which constraints bound a number."""
    for constraint in metadata:
        if isinstance(constraint, pydantic.fields.FieldInfo):
            yield from sides(constraint.metadata)
        elif isinstance(constraint, annotated_types.Interval):
            yield from sides(constraint)
        elif isinstance(constraint, annotated_types.Ge | annotated_types.Gt):
            yield "lower"
        elif isinstance(constraint, annotated_types.Le | annotated_types.Lt):
            yield "upper"


def unbounded(settings):
    return [
        name
        for name, field in settings.model_fields.items()
        for metadata in numbers(field.annotation, tuple(field.metadata))
        if set(sides(metadata)) != {"lower", "upper"}
    ]


def test_every_numeric_field_has_a_lower_and_an_upper_bound():
    found = {name: unbounded(settings) for name, settings in settings_classes().items()}
    assert len(found) > 20
    assert {name: fields for name, fields in found.items() if fields} == {}


def test_the_walk_finds_a_field_without_bounds():
    class Example(Settings):
        bounded: typing.Annotated[int, pydantic.Field(ge=0, le=3)] | None = None
        half: int = pydantic.Field(default=0, ge=0)
        inside: tuple[float, ...] = ()

    assert unbounded(Example) == ["half", "inside"]
