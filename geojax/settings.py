"""Settings classes: YAML files and overrides are read into them, with one-line errors.

A settings class derives from `Settings`; `load_yaml` and `validate` turn a file into one. Every
mistake becomes a one-line `UserError` that names the field's path and the nearest valid name.
"""

import re
import reprlib
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic

from geojax.errors import UserError
from geojax.paths import expanded_path
from geojax.suggestions import did_you_mean, listed, nearest, shortened


class Settings(pydantic.BaseModel):
    """Base of every settings class: frozen, unknown keys refused, docs under the fields."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
    lister: ClassVar[str | None] = None
    """Command that lists the keys of a section, which is its argument."""

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Refuse true and false where a number belongs, which Python takes for 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            accepted = classes_in(cls.model_fields[info.field_name].annotation)
            if bool not in accepted and {int, float} & set(accepted):
                raise ValueError(f"expected a number, not {str(value).lower()}")
        return value


UNLESS_AUTO = pydantic.Discriminator(lambda value: "auto" if value == "auto" else "number")
"""Marks a field that is `AUTO` or else of a type that is tagged `NUMBER`: one error, not two."""

AUTO = Annotated[Literal["auto"], pydantic.Tag("auto")]
NUMBER = pydantic.Tag("number")

_LONGEST_PROBLEMS = 320
_LONGEST_PROBLEM = 300

SettingsType = TypeVar("SettingsType", bound=Settings)


def load_yaml(path: Path, most_bytes: int | None = None) -> dict[str, Any]:
    """Read the mapping in the YAML file at `path`.

    Args:
        path: the file.
        most_bytes: size of the largest file that is read; None: that of settings.

    Raises:
        UserError: the file is missing, is not YAML, or holds something other than a mapping.
    """
    # Imported here, so that a program that reads no files does without PyYAML.
    from geojax.yaml_syntax import MOST_BYTES, YamlError, parse

    try:
        path = expanded_path(path)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device never ends
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise UserError(f"{path}: is {kind}; a YAML file would do")
        most_bytes = most_bytes or MOST_BYTES
        if status.st_size > most_bytes:
            raise UserError(
                f"{path}: has {status.st_size:,} bytes; a YAML file of up to {most_bytes:,} would "
                "do"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        content = parse(text, most_bytes or MOST_BYTES)
    except YamlError as error:
        where = f"{path}:{error.line}" if error.line else str(path)
        raise UserError(f"{where}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping of settings, found {_describe(content)}")
    return content


def validate(settings: type[SettingsType], content: Mapping[str, Any], source: str) -> SettingsType:
    """Validate `content` as an instance of `settings`; messages begin with `source`, a file, say.

    Raises:
        UserError: one line with the path of every field that is wrong, what is wrong, and the
            nearest valid name when a key is unknown.
    """
    try:
        return settings.model_validate(content)
    except pydantic.ValidationError as error:
        # A misspelt required key is both unknown and missing: the first says more. A default that
        # depends on a wrong field is no mistake of its own, nor is a list too short without it.
        consequences = ("default_factory_not_called", "too_short")
        found = [each for each in error.errors() if each["type"] not in consequences]
        found = found or error.errors()
        found.sort(key=lambda problem: problem["type"] != "extra_forbidden")
        problems = [_sentence(settings, problem) for problem in found]
        shown = (shortened(problem, _LONGEST_PROBLEM) for problem in problems)
        raise UserError(f"{source}: {listed(shown, '; also ', _LONGEST_PROBLEMS)}") from None


def leaves_by_key(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted key; an empty mapping is a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from leaves_by_key(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value


def preset_path(kind: str, name: str) -> Path:
    """Return the file of the preset `name` in `configs/<kind>/`; `kind` is "model" or "topology".

    Raises:
        UserError: there is no such preset; the message lists the nearest or all of them.
    """
    folder = _presets_folder() / kind
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise UserError(f"no {kind} preset is called '{name}'; {did_you_mean(name, known)}")
    return folder / f"{name}.yaml"


def _presets_folder() -> Path:
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _sentence(settings: type[pydantic.BaseModel], problem: Any) -> str:
    parts = tuple(problem["loc"])
    location = tuple(part for part in parts if not _UNION_MEMBER.fullmatch(str(part)))
    path = ".".join(shortened(str(part)) for part in location)
    kind, given = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        known = _fields_at(settings, location[:-1])
        lister = getattr(settings, "lister", None)
        if lister is not None:
            lister = " ".join([lister, ".".join(map(str, location[:-1]))]).strip()
        return f"{path}: unknown key; {did_you_mean(str(location[-1]), known, lister)}"
    if kind == "missing":
        return f"{path}: is required and missing"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message.replace("a valid tuple", "a list")  # as YAML calls it
    if kind == "value_error":
        return f"{path}: {message}" if location else message
    wrong = f"{path}: {message[:1].lower()}{message[1:]}, not {_describe(given)}"
    choices = re.findall("'([^']+)'", str(problem.get("ctx", {}).get("expected", "")))
    near = nearest(given, choices) if isinstance(given, str) else None
    return f"{wrong}; did you mean '{near}'?" if near else wrong


def _fields_at(settings: type[pydantic.BaseModel], location: tuple[Any, ...]) -> list[str]:
    """List the fields of the settings class at `location` below `settings`."""
    classes = _classes_at(settings, location)
    return sorted({name for c in classes for name in getattr(c, "model_fields", {})})


def _classes_at(settings: type[pydantic.BaseModel], location: tuple[Any, ...]) -> list[type]:
    """List the classes in the annotation of the field at `location` below `settings`."""
    current: Any = settings
    for part in location:
        classes = [c for c in classes_in(current) if issubclass(c, pydantic.BaseModel)]
        fields = [c.model_fields[part].annotation for c in classes if part in c.model_fields]
        current = fields[0] if fields else current
    return classes_in(current)


def classes_in(annotation: Any) -> list[type]:
    """List the classes in an annotation: str, Link, NoneType for `dict[str, Link] | None`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation]
    return [c for inner in typing.get_args(annotation) for c in classes_in(inner)]


_UNION_MEMBER = re.compile(r"number|bool|literal\[.*|tuple\[.*")
"""Pydantic's names of the types of a field that may have several, which are no keys."""


def _describe(value: Any) -> str:
    return "nothing" if value is None else f"{_SHORT.repr(value)} ({type(value).__name__})"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
