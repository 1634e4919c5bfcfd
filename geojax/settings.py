"""Settings classes: YAML files and overrides are read into them, with one-line errors.

A settings class derives from `Settings`; `load_settings` turns a file into one. All mistakes become
one `UserError`, a line each, with the file's line, the field's path and the nearest valid name.
"""

import math
import re
import reprlib
import stat
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import pydantic

from geojax.errors import MistakesError, UserError
from geojax.origins import KeyPath, Origins, ValuePlace
from geojax.paths import expanded_path
from geojax.suggestions import ForeignNames, did_you_mean, nearest, shortened


class Settings(pydantic.BaseModel):
    """Base of every settings class: frozen, unknown keys refused, docs under the fields."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
    lister: ClassVar[str | None] = None
    """Command that lists the keys of a section, which is its argument."""
    foreign_names: ClassVar[ForeignNames | None] = None
    """Names that other software has for the keys and values of the whole config."""

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

_MOST_PROBLEMS = 20
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
    return load_with_origins(path, most_bytes)[0]


def load_with_origins(path: Path, most_bytes: int | None = None) -> tuple[dict[str, Any], Origins]:
    """Read the mapping in the YAML file at `path`, with the lines of its values.

    Raises:
        UserError: see `load_yaml`.
    """
    # Imported here, so that a program that reads no files does without PyYAML.
    from geojax.yaml_syntax import MOST_BYTES, YamlError, parse_document

    text = _read_text(path, most_bytes or MOST_BYTES)
    try:
        content, lines = parse_document(text, most_bytes or MOST_BYTES)
    except YamlError as error:
        raise UserError(f"{ValuePlace(str(path), error.line)}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping of settings, found {_describe(content)}")
    places = {key: ValuePlace(str(path), line) for key, line in lines.items()}
    return content, Origins(str(path), places)


def _read_text(path: Path, most_bytes: int) -> str:
    try:
        path = expanded_path(path)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device never ends
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise UserError(f"{path}: is {kind}; a YAML file would do")
        if status.st_size > most_bytes:
            raise UserError(
                f"{path}: has {status.st_size:,} bytes; a YAML file of up to {most_bytes:,} would "
                "do"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def load_settings(
    settings: type[SettingsType], path: Path, defaults: Mapping[str, Any] | None = None
) -> SettingsType:
    """Read the YAML file at `path` as an instance of `settings`.

    Args:
        settings: the class.
        path: the file.
        defaults: values of keys that the file may leave out.

    Raises:
        UserError: the file cannot be read, or has mistakes; see `validate`.
    """
    content, origins = load_with_origins(path)
    return validate(settings, {**(defaults or {}), **content}, origins)


def validate(
    settings: type[SettingsType], content: Mapping[str, Any], source: str | Origins
) -> SettingsType:
    """Validate `content` as an instance of `settings`.

    Args:
        settings: the class.
        content: the values.
        source: the place that messages begin with: one for all values, or of each value its own.

    Raises:
        UserError: a line for each mistake, with its place, the field's path, what is wrong, and the
            nearest valid name when a key is unknown.
    """
    try:
        return settings.model_validate(content)
    except pydantic.ValidationError as error:
        origins = Origins(source) if isinstance(source, str) else source
        mistakes = _mistakes(settings, error, origins)
        lines = [str(mistake) for mistake in mistakes[:_MOST_PROBLEMS]]
        if (rest := len(mistakes) - len(lines)) > 0:
            lines.append(f"{origins.source}: has {rest:,} more mistakes; correct these first")
        raise MistakesError(lines) from None


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


class _Mistake(NamedTuple):
    """A mistake in a config."""

    place: ValuePlace
    path: KeyPath
    """Key path of the value; empty: the mistake is of values together."""
    problem: str
    meant: str | None = None
    """Key that is meant in place of an unknown one, if it stands beside it."""

    def __str__(self) -> str:
        key = ".".join(shortened(part) for part in self.path)
        text = f"{key}: {self.problem}" if self.path else self.problem
        text = shortened(text.replace("\n", "; also "), _LONGEST_PROBLEM)
        names_its_place = self.place.source in (f"--{key}", f"--{_first_key(self.problem)}")
        return f"--{text}" if names_its_place else f"{self.place}: {text}"


def _mistakes(
    settings: type[pydantic.BaseModel], error: pydantic.ValidationError, origins: Origins
) -> list[_Mistake]:
    """List the mistakes by their lines, without those that only follow from another.

    A default that depends on a wrong field is no mistake of its own, nor is a list too short
    without it. A misspelt required key is both unknown and missing: the first says more.
    """
    consequences = ("default_factory_not_called", "too_short")
    problems = [each for each in error.errors() if each["type"] not in consequences]
    mistakes = [_mistake(settings, each, origins) for each in problems or error.errors()]
    meant = {(*each.path[:-1], each.meant) for each in mistakes if each.meant is not None}
    mistakes = [each for each in mistakes if each.path not in meant or each.problem != _MISSING]
    mistakes = _joined(mistakes)
    sources = dict.fromkeys(place.source for place in origins.places.values())
    order = {source: number for number, source in enumerate(sources)}
    return sorted(
        mistakes,
        key=lambda each: (order.get(each.place.source, len(order)), each.place.line or math.inf),
    )


def _joined(mistakes: Iterable[_Mistake]) -> list[_Mistake]:
    """Join the mistakes of one value, which suits none of several types, into one."""
    joined: dict[KeyPath, _Mistake] = {}
    for mistake in mistakes:
        heads = (mistake.path[:length] for length in range(1, len(mistake.path) + 1))
        first = next((head for head in heads if head in joined), None)
        if first is None:
            joined[mistake.path or (mistake.problem,)] = mistake
            continue
        key = ".".join(mistake.path)
        problem = f"{joined[first].problem}; also {key}: {mistake.problem}"
        joined[first] = joined[first]._replace(problem=problem)
    return list(joined.values())


def _mistake(settings: type[pydantic.BaseModel], problem: Any, origins: Origins) -> _Mistake:
    parts = (str(part) for part in problem["loc"])
    path = tuple(part for part in parts if not _UNION_MEMBER.fullmatch(part))
    place = origins.of(path)
    kind, given = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        return _unknown_key(settings, path, place)
    if kind == "missing":
        return _Mistake(place, path, _MISSING)
    foreign = getattr(settings, "foreign_names", None)
    meant = foreign.value_of(".".join(path), given) if foreign is not None else None
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message.replace("a valid tuple", "a list")  # as YAML calls it
    if kind == "value_error":
        if not path and (named := origins.places.get(tuple(_first_key(message).split(".")))):
            place = named
        if meant is not None:
            message = f"{message.partition(';')[0]}; in geojax it is '{meant}'"
        return _Mistake(place, path, message)
    wrong = f"{message[:1].lower()}{message[1:]}, not {_describe(given)}"
    if meant is not None:
        return _Mistake(place, path, f"no value is called '{given}'; in geojax it is '{meant}'")
    choices = re.findall("'([^']+)'", str(problem.get("ctx", {}).get("expected", "")))
    near = nearest(given, choices) if isinstance(given, str) else None
    return _Mistake(place, path, f"{wrong}; did you mean '{near}'?" if near else wrong)


def _unknown_key(settings: type[pydantic.BaseModel], path: KeyPath, place: ValuePlace) -> _Mistake:
    *section, name = path
    foreign = getattr(settings, "foreign_names", None)
    if foreign is not None and (meant := foreign.key_of(".".join(path))) is not None:
        key = meant.partition(" ")[0].partition("=")[0]
        *of_section, of_name = key.split(".")
        return _Mistake(
            place,
            path,
            f"unknown key; in geojax it is {meant}",
            of_name if of_section == section else None,
        )
    known = _fields_at(settings, section)
    lister = getattr(settings, "lister", None)
    if lister is not None:
        lister = " ".join([lister, ".".join(section)]).strip()
    hint = did_you_mean(name, known, lister)
    return _Mistake(place, path, f"unknown key; {hint}", nearest(name, known))


_MISSING = "is required and missing"


def _first_key(message: str) -> str:
    """Return the dotted key that a message begins with, or the empty text."""
    match = re.match(r"[a-z_]\w*(?:\.\w+)*", message)
    return match[0] if match else ""


def _fields_at(settings: type[pydantic.BaseModel], location: Sequence[str]) -> list[str]:
    """List the fields of the settings class at `location` below `settings`."""
    classes = _classes_at(settings, location)
    return sorted({name for c in classes for name in getattr(c, "model_fields", {})})


def _classes_at(settings: type[pydantic.BaseModel], location: Sequence[str]) -> list[type]:
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
