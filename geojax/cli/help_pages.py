"""Help of the command, of its verbs and of the config's sections, as wide as the terminal."""

import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tyro

from geojax.cli.arguments import ArgumentMark, fields_of
from geojax.cli.config_keys import Section, Setting, config_sections, sections_below
from geojax.cli.type_words import in_words
from geojax.cli.verbs import VERBS, arguments_class, attribute_docstrings, summary
from geojax.settings import Settings

_WIDEST = 100
_INDENT = " " * 6


class _Option(NamedTuple):
    """An argument of a verb as its help shows it."""

    head: str
    """Name, value and default."""
    meaning: Sequence[str]
    """Paragraphs."""
    is_positional: bool
    is_required: bool


def terminal_width() -> int:
    """Return the number of columns to fill; lines longer than 100 are hard to read."""
    return max(20, min(shutil.get_terminal_size().columns, _WIDEST))


def overview(group: str | None = None) -> str:
    """List the verbs, or those that begin with a word, each with the first sentence of its help."""
    names = [name for name in VERBS if group in (None, name.partition(" ")[0])]
    longest = max(map(len, names))
    lines = [
        *_wrapped("usage: geojax VERB ...; geojax VERB --help explains one"),
        "",
        "Train transformers across data centers.",
        "",
    ]
    for name in names:
        lines += _wrapped(summary(name), f"  {name:{longest}}  ", " " * (longest + 4))
    return "\n".join(lines)


def help_of_verb(name: str) -> str:
    """Return the help of a verb: its meaning, arguments, options, and the config's sections."""
    command = arguments_class(name)
    options = list(_options(command))
    words = [each.head.split("  ")[0] for each in options if each.is_positional]
    usage = " ".join(["geojax", name, *words])
    if any(not each.is_positional for each in options):
        usage += " [OPTIONS]"
    if VERBS[name].changes_settings:
        usage += " [--KEY VALUE ...]"
    if name == "launch":
        usage += " -- VERB ..."
    lines = [*_wrapped(f"usage: {usage}", after=" " * 7), ""]
    for paragraph in (inspect.getdoc(command) or "").split("\n\n"):
        lines += [*_wrapped(paragraph), ""]
    for title, positional in (("arguments", True), ("options", False)):
        chosen = [each for each in options if each.is_positional == positional]
        if chosen:
            lines.append(f"{title}:")
            for each in chosen:
                lines += _entry(each.head, each.meaning)
            lines.append("")
    if VERBS[name].changes_settings:
        lines += _section_list(name)
    return "\n".join(lines).rstrip()


def help_of_section(key: str) -> str:
    """Return the keys of a section of the config, or one key, with types and meanings.

    Raises:
        UserError: there is no such section.
    """
    lines: list[str] = []
    for section in sections_below(key, config_sections()):
        lines += _section_lines(section)
    return "\n".join(lines).rstrip().replace("`", "")


def _section_list(verb: str) -> list[str]:
    """List the keys at the top of a config, and its sections, with a line each."""
    top, *rest = config_sections()
    entries = {each.key: each.meaning for each in top.settings}
    entries |= {each.key: each.meaning for each in reversed(rest) if "." not in each.key}
    longest = max(map(len, entries))
    lines = _wrapped(
        f"keys of the config (geojax {verb} --help KEY explains one, or all in a section):"
    )
    for key, meaning in sorted(entries.items()):
        sentence = f"{meaning.partition('. ')[0].rstrip('.')}.".replace("`", "")
        room = terminal_width() - longest - 4
        lines.append(f"  {key:{longest}}  {textwrap.shorten(sentence, room, placeholder=' ...')}")
    return lines


def _section_lines(section: Section) -> Iterator[str]:
    if section.key:
        yield from _wrapped(f"{section.key}: {section.meaning}")
    for setting in section.settings:
        yield from _entry(_head(setting), [setting.meaning])
    yield ""


def _head(setting: Setting) -> str:
    return f"--{setting.key}  {setting.type}  ({setting.default})"


def _entry(head: str, meaning: Sequence[str]) -> Iterator[str]:
    yield from _wrapped(head, "  ", _INDENT)
    for paragraph in meaning:
        yield from _wrapped(paragraph, _INDENT, _INDENT)


def _wrapped(text: str, first: str = "", after: str = "") -> list[str]:
    """Wrap a paragraph to the terminal's width, between words alone unless one is longer."""
    # Double blanks divide the parts of an entry's head, and stay.
    return textwrap.wrap(
        " ".join(text.split("\n")),
        terminal_width(),
        initial_indent=first,
        subsequent_indent=after,
        break_on_hyphens=False,
    )


def _options(command: type[Any], prefix: str = "") -> Iterator[_Option]:
    """Yield the arguments of a verb; those of a group follow with the group's name."""
    hints = typing.get_type_hints(command, include_extras=True)
    docstrings = attribute_docstrings(command)
    for field, is_required in fields_of(command):
        annotation, marks = hints[field], getattr(hints[field], "__metadata__", ())
        inner = typing.get_args(annotation)[0] if marks else annotation
        argument: Any = next((mark for mark in marks if type(mark) is ArgumentMark), None)
        name = field if argument is None or argument.name is None else argument.name
        if dataclasses.is_dataclass(inner):
            assert isinstance(inner, type), "a group is a class"
            yield from _options(inner, f"{prefix}{name}." if name else prefix)
            continue
        meaning = [docstrings.get(field, "")]
        if argument is not None and isinstance(argument.help, str):
            meaning = argument.help.split("\n")
        metavar = None if argument is None else argument.metavar
        if tyro.conf.Positional in marks:
            words = in_words(inner, may_be_absent=True)
            yield _Option(f"{metavar or name.upper()}  {words}", meaning, True, is_required)
            continue
        option = f"--{prefix}{name}".replace("_", "-")
        head = f"{option} {metavar}" if metavar else option
        if inner is bool:
            if tyro.conf.FlagCreatePairsOff not in marks:
                head += f", --no-{prefix}{name}".replace("_", "-")
        else:
            repeated = tyro.conf.UseAppendAction in marks
            words = in_words(
                typing.get_args(inner)[0] if repeated else annotation, may_be_absent=True
            )
            head += f"  {words}, may be repeated" if repeated else f"  {words}"
        default = _default_of(command, field)
        if is_required:
            head += "  (required)"
        elif default:
            head += f"  ({default})"
        yield _Option(head.replace("`", ""), meaning, False, is_required)


def _default_of(command: type[Any], field: str) -> str:
    """Write the default of a field; empty: it says nothing."""
    if issubclass(command, Settings):
        default = command.model_fields[field].get_default(call_default_factory=True)
    else:
        default = next(each.default for each in dataclasses.fields(command) if each.name == field)
    if default in (None, (), dataclasses.MISSING) or isinstance(default, bool):
        return ""
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
