"""The `geojax` command: find the subcommand, run it, and print a user's mistake in one line."""

import atexit
import contextlib
import dataclasses
import errno
import io
import itertools
import operator
import os
import pathlib
import re
import select
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_type_hints

import geojax
from geojax.cli.escaping import escaped
from geojax.cli.verbs import GROUPS, RENAMED, VERBS, arguments_class, imported, module_of
from geojax.errors import FencedError, RunError, UserError, is_disk_full
from geojax.exit_codes import FAILURE, FENCED, INTERRUPTED, UNREAD, USAGE
from geojax.suggestions import did_you_mean

_HELP = ("-h", "--help")
_WRONG_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
_LONGEST_LINE = 490


def main() -> None:
    """Run the `geojax` command with this process's arguments, and exit."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would report what it can no longer write, on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or UNREAD
    except (OSError, ValueError):  # a full disk, or a closed stream
        pass
    if code in (USAGE, FAILURE):
        _end_at_once(code)
    sys.exit(code)


def _end_at_once(code: int) -> NoReturn:
    """End this process after an error without Python's own end.

    Python's end collects millions of objects and waits for threads. That takes seconds on an idle
    machine and a minute on a busy one, in which the failed process still holds sites, ports and
    devices.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run one subcommand and return the exit code."""
    if arguments[:1] == ["--version"]:
        print(f"geojax {geojax.__version__}")
        return 0
    try:
        _check_text(arguments)
        if not arguments or arguments[0] in _HELP:
            print(_overview())
            return 0
        return _run(arguments)
    except UserError as error:
        lines = [f"error: {line}" for line in error.lines]
        return _end(lines, FAILURE if is_disk_full(error) else USAGE)
    except RunError as error:
        return _end([f"error: {error}"], FENCED if isinstance(error, FencedError) else FAILURE)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return UNREAD
        is_full = is_disk_full(error)
        if not is_full and (error.errno not in _WRONG_PATHS or error.filename is None):
            return _unexpected()
        where = "" if error.filename is None else f"{error.filename}: "
        return _end([f"error: {where}{error.strerror}"], FAILURE if is_full else USAGE)
    except KeyboardInterrupt:
        return _end(["interrupted"], INTERRUPTED)
    except Exception:
        return _unexpected()


def _is_unread() -> bool:
    """Return True if the reader of the output has gone, as in `geojax --help | head -1`."""
    output = select.poll()
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        output.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _run(arguments: list[str]) -> int:
    if arguments[0] in GROUPS and {*_HELP}.intersection(arguments[1:2]):
        print(_overview(arguments[0]))
        return 0
    if arguments[0] in GROUPS:  # a verb of two words
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    launched: list[str] = []
    if arguments[0] == "launch" and "--" in arguments:  # the rest belongs to another command
        separator = arguments.index("--")
        arguments, launched = arguments[:separator], arguments[separator + 1 :]
    name = arguments[0]
    _check_name(name)
    if not {*_HELP}.isdisjoint(arguments):
        print(_help(arguments))
        return 0
    _check_options(arguments)
    command, unknown = _parse(_config_first(arguments))
    if name == "launch" and unknown and not unknown[0].startswith("-"):
        raise UserError(
            f"geojax launch: '{unknown[0]}' is no option; put -- before the command that is "
            f"launched: geojax launch -- {' '.join(unknown)}"
        )
    if unknown and not VERBS[name].changes_settings:
        raise UserError(f"unknown argument {unknown[0]}; see geojax {name} --help")
    module = module_of(name)
    if VERBS[name].announces:  # JAX takes a second to come
        module.announce(command, unknown)
    if VERBS[name].uses_jax:
        imported("jax")
        imported("geojax.runtime.variables").check_environment(os.environ)
    if VERBS[name].changes_settings:
        return int(module.run(command, unknown))
    return int(module.run(command, launched) if name == "launch" else module.run(command))


def _overview(group: str | None = None) -> str:
    from geojax.cli.help_pages import overview

    return overview(group)


def _help(arguments: Sequence[str]) -> str:
    """Return the help of a verb, or of the section of the config that stands after --help.

    Raises:
        UserError: the config has no such section.
    """
    from geojax.cli.help_pages import help_of_section, help_of_verb

    name, *words = arguments
    asked = next(index for index, word in enumerate(words) if word in _HELP)
    sections = [word for word in words[asked + 1 :] if not word.startswith("-")]
    sections = [word for word in sections if not word.endswith((".yaml", ".yml"))]
    if sections and VERBS[name].changes_settings:
        return help_of_section(sections[0])
    return help_of_verb(name)


def _parse(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the subcommand and the arguments that it does not know.

    Raises:
        UserError: an option lacks its value, or has one that is not possible. Tyro prints that in a
            box with the option's help.
    """
    import tyro

    from geojax.cli.arguments import REGISTRY, UncheckedArguments
    from geojax.settings import validate

    name, *words = arguments
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), REGISTRY:
            command, unknown = tyro.cli(
                arguments_class(name), prog=f"geojax {name}", args=words, return_unknown_args=True
            )
    except SystemExit as end:
        if not end.code:
            raise
        # A title, the problem and a rule, in a box of ASCII where stdout is not UTF-8.
        _, *lines = box.getvalue().splitlines()
        lines = ["" if set(line) <= set("│─-╰╯ ") else line.strip("│ ") for line in lines]
        paragraph = itertools.takewhile(bool, itertools.dropwhile(operator.not_, lines))
        problem = " ".join(paragraph).rstrip(".")
        if absent := re.match(r"Missing from .*?: (--\S+ \S+|\S+) (.*?)\.? \(required\)", problem):
            option, meaning = absent.groups()
            if meaning[1:2].islower():  # no acronym
                meaning = f"{meaning[:1].lower()}{meaning[1:]}"
            problem = f"{option} is missing; it would be the {meaning}"
        raise UserError(f"geojax {name}: {problem}") from None
    if isinstance(command, UncheckedArguments):
        given = command.values | _resolved_paths(command.values, name)
        return validate(command.settings, given, f"geojax {name}"), unknown
    return dataclasses.replace(command, **_resolved_paths(vars(command), name)), unknown


def _resolved_paths(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Resolve the paths of a subcommand, but for its config, which messages name as it was given.

    Raises:
        UserError: one is no path.
    """
    from geojax.cli.arguments import arguments_of
    from geojax.paths import resolved_path

    resolved: dict[str, Any] = {}
    for argument in arguments_of(arguments_class(name)):
        value = given.get(argument.field)
        paths = value if isinstance(value, tuple) else (value,)
        if argument.field == "config" or not paths or not isinstance(paths[0], pathlib.Path):
            continue
        try:
            paths = tuple(resolved_path(path) for path in paths)
        except UserError as error:
            option = "RUN" if argument.name == "run" else f"--{argument.name.replace('_', '-')}"
            raise UserError(f"geojax {name}: {option}: {error}") from None
        resolved[argument.field] = paths if isinstance(value, tuple) else paths[0]
    return resolved


def _check_text(arguments: Sequence[str]) -> None:
    """Check that arguments are text, which bytes of a file name need not be.

    Raises:
        UserError: one is not UTF-8.
    """
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise UserError(f"the argument {argument!r} is no UTF-8 text")


def _check_name(name: str) -> None:
    """Check that there is a subcommand called `name`.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    if name in VERBS:
        return
    if name.startswith("-"):
        raise UserError(f"'{name}' stands before a subcommand; there are: {', '.join(VERBS)}")
    if name in RENAMED:
        raise UserError(f"geojax {name} is called geojax {RENAMED[name]} now")
    longer = [known for known in VERBS if known.startswith(f"{name} ")]
    hint = f"did you mean {' or '.join(map(repr, longer))}?" if longer else None
    raise UserError(f"there is no subcommand '{name}'; {hint or did_you_mean(name, VERBS)}")


def _check_options(arguments: Sequence[str]) -> None:
    """Check that no option or override is lost to a later one.

    Raises:
        UserError: one is given twice, and is not among those that may be repeated, or before the
            group of settings that it stands in.
    """
    import tyro

    name, *words = arguments
    fields = get_type_hints(arguments_class(name), include_extras=True)
    seen: dict[str, str] = {}
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        field = option.removeprefix("--").replace("-", "_")
        if field not in fields and field.removeprefix("no_") in fields:
            field = field.removeprefix("no_")
        marks = getattr(fields.get(field), "__metadata__", ())
        if field in seen and tyro.conf.UseAppendAction not in marks:
            raise UserError(f"geojax {name}: {option} is given twice; give it once")
        if inside := next((seen[each] for each in seen if each.startswith(f"{field}.")), None):
            raise UserError(
                f"geojax {name}: {option} would replace {inside}, which stands before it; give "
                f"{option} first"
            )
        seen[field] = option


def _config_first(arguments: Sequence[str]) -> list[str]:
    """Move the config file before the settings that stand before it; they all have a value.

    Raises:
        UserError: the subcommand needs a config file, and there is none.
    """
    from geojax.cli.arguments import arguments_of

    name, *words = arguments
    known = list(arguments_of(arguments_class(name)))
    required = {argument.name for argument in known if argument.is_required}
    if "config" not in required:
        return list(arguments)
    alone = {f"--{argument.name}" for argument in known if argument.may_stand_alone}
    free = [
        index
        for index, (before, word) in enumerate(zip(["", *words], words, strict=False))
        if not word.startswith("-")
        and (before in alone or "=" in before or not before.startswith("--"))
    ]
    if not free:
        raise UserError(
            f"geojax {name}: CONFIG is missing; name the YAML file of a run: geojax {name} run.yaml"
        )
    config = next((index for index in free if words[index].endswith((".yaml", ".yml"))), free[0])
    return [name, words[config], *words[:config], *words[config + 1 :]]


def _unexpected() -> int:
    """Print the traceback of the exception that is handled, and end."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
    return _end(["error: unexpected, see the traceback above"], FAILURE)


def _one_line(message: str) -> str:
    """Escape control characters, and cut a line that would fill a screen."""
    shown = escaped(message)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[:_LONGEST_LINE]}..."


def _end(lines: Sequence[str], code: int) -> int:
    """Print the reason; in a run of several processes the others are told too, and end as well."""
    lines = [_one_line(line) for line in lines]
    with contextlib.suppress(OSError):  # nobody may be reading the output any more
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    if "geojax.runtime" in sys.modules:
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        sys.modules["geojax.runtime"].abort_job(f"{lines[0]}{more}", code)
    return code
