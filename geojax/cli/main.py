"""The `geojax` command: find the subcommand, run it, and print a user's mistake in one line."""

import atexit
import contextlib
import dataclasses
import errno
import inspect
import io
import itertools
import operator
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import tyro

import geojax
from geojax.cli import (
    data,
    data_show,
    evaluate,
    export,
    generate,
    launch,
    plan,
    plan_options,
    probe,
    settings,
    train,
    wan,
)
from geojax.cli.arguments import REGISTRY, UncheckedArguments, arguments_of
from geojax.cli.escaping import escaped
from geojax.errors import RunError, UserError, is_disk_full
from geojax.exit_codes import FAILURE, INTERRUPTED, USAGE
from geojax.paths import resolved_path
from geojax.runtime.variables import check_environment
from geojax.settings import validate
from geojax.suggestions import did_you_mean

Subcommand = (
    Annotated[train.TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[plan_options.PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[settings.SettingsCommand, tyro.conf.subcommand("settings")]
    | Annotated[probe.ProbeCommand, tyro.conf.subcommand("probe")]
    | Annotated[export.ExportCommand, tyro.conf.subcommand("export")]
    | Annotated[generate.GenerateCommand, tyro.conf.subcommand("generate")]
    | Annotated[evaluate.EvaluateCommand, tyro.conf.subcommand("evaluate")]
    | Annotated[data.PrepareCommand, tyro.conf.subcommand("data prepare")]
    | Annotated[data_show.ShowCommand, tyro.conf.subcommand("data show")]
    | Annotated[launch.LaunchCommand, tyro.conf.subcommand("launch")]
    | Annotated[wan.WanUpCommand, tyro.conf.subcommand("wan up")]
    | Annotated[wan.WanDownCommand, tyro.conf.subcommand("wan down")]
    | Annotated[wan.WanStatusCommand, tyro.conf.subcommand("wan status")]
    | Annotated[wan.WanCutCommand, tyro.conf.subcommand("wan cut")]
    | Annotated[wan.WanRestoreCommand, tyro.conf.subcommand("wan restore")]
)

_COMMANDS: dict[str, type[Any]] = {
    marker.name: command for command, marker in map(get_args, get_args(Subcommand))
}
_HELP = ("-h", "--help")
_WRONG_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
_LONGEST_MESSAGE = 490
_RENAMED = {
    "memory": "plan",
    "compile": "plan --compile",
    "simulate": "plan --schedules",
    "wan mend": "wan restore",
}


def main() -> None:
    """Run the `geojax` command with this process's arguments, and exit."""
    code = run(sys.argv[1:])
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
        return _end(f"error: {error}", FAILURE if is_disk_full(error) else USAGE)
    except RunError as error:
        return _end(f"error: {error}", FAILURE)
    except OSError as error:
        is_full = is_disk_full(error)
        if not is_full and (error.errno not in _WRONG_PATHS or error.filename is None):
            return _unexpected()
        where = "" if error.filename is None else f"{error.filename}: "
        return _end(f"error: {where}{error.strerror}", FAILURE if is_full else USAGE)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    except Exception:
        return _unexpected()


def _run(arguments: list[str]) -> int:
    if arguments[0] in ("data", "wan"):  # a subcommand of two words
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    launched: list[str] = []
    if arguments[0] == "launch" and "--" in arguments:  # the rest belongs to another command
        separator = arguments.index("--")
        arguments, launched = arguments[:separator], arguments[separator + 1 :]
    _check_name(arguments[0])
    check_environment(os.environ)
    _check_options(arguments)
    command, unknown = _parse(_config_first(arguments))
    if isinstance(command, train.TrainCommand):
        return train.run(command, unknown)
    if isinstance(command, plan_options.PlanCommand):
        return plan.run(command, unknown)
    if isinstance(command, probe.ProbeCommand):
        return probe.run(command, unknown)
    if isinstance(command, data_show.ShowCommand):
        return data_show.run(command, unknown)
    if isinstance(command, launch.LaunchCommand):
        if unknown and not unknown[0].startswith("-"):
            raise UserError(
                f"geojax launch: '{unknown[0]}' is no option; put -- before the command that is "
                f"launched: geojax launch -- {' '.join(unknown)}"
            )
        _refuse(unknown, arguments[0])
        return launch.run(command, launched)
    _refuse(unknown, arguments[0])
    if isinstance(command, settings.SettingsCommand):
        return settings.run(command)
    if isinstance(command, wan.WanCommand):
        return wan.run(command)
    if isinstance(command, export.ExportCommand):
        return export.run(command)
    if isinstance(command, generate.GenerateCommand):
        return generate.run(command)
    if isinstance(command, evaluate.EvaluateCommand):
        return evaluate.run(command)
    return data.run(command)


def _overview() -> str:
    """List the subcommands, each with the first sentence of its help."""
    width = max(map(len, _COMMANDS))
    lines = [
        "usage: geojax COMMAND ...; geojax COMMAND --help explains one",
        "",
        "Train transformers across data centers.",
        "",
    ]
    for name, command in _COMMANDS.items():
        summary, _, _ = (inspect.getdoc(command) or "").partition("\n\n")
        lines.append(f"  {name:{width}}  {' '.join(summary.split())}")
    return "\n".join(lines)


def _parse(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the subcommand and the arguments that it does not know.

    Raises:
        UserError: an option lacks its value, or has one that is not possible. Tyro prints that in a
            box with the option's help.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), REGISTRY:
            command, unknown = tyro.cli(
                Subcommand,
                prog="geojax",
                description="Train transformers across data centers.",
                args=arguments,
                return_unknown_args=True,
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
            name, meaning = absent.groups()
            problem = f"{name} is missing; it would be the {meaning[:1].lower()}{meaning[1:]}"
        raise UserError(f"geojax {arguments[0]}: {problem}") from None
    name = arguments[0]
    if isinstance(command, UncheckedArguments):
        given = command.values | _resolved_paths(command.values, name)
        return validate(command.settings, given, f"geojax {name}"), unknown
    return dataclasses.replace(command, **_resolved_paths(vars(command), name)), unknown


def _resolved_paths(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Resolve the paths of a subcommand, but for its config, which messages name as it was given.

    Raises:
        UserError: one is no path.
    """
    resolved: dict[str, Any] = {}
    for argument in arguments_of(_COMMANDS[name]):
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


def _refuse(unknown: Sequence[str], name: str) -> None:
    if unknown:
        raise UserError(f"unknown argument {unknown[0]}; see geojax {name} --help")


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
    if name in _COMMANDS:
        return
    if name.startswith("-"):
        raise UserError(f"'{name}' stands before a subcommand; there are: {', '.join(_COMMANDS)}")
    if name in _RENAMED:
        raise UserError(f"geojax {name} is called geojax {_RENAMED[name]} now")
    longer = [known for known in _COMMANDS if known.startswith(f"{name} ")]
    hint = f"did you mean {' or '.join(map(repr, longer))}?" if longer else None
    raise UserError(f"there is no subcommand '{name}'; {hint or did_you_mean(name, _COMMANDS)}")


def _check_options(arguments: Sequence[str]) -> None:
    """Check that no option or override is lost to a later one.

    Raises:
        UserError: one is given twice, and is not among those that may be repeated, or before the
            group of settings that it stands in.
    """
    name, *words = arguments
    fields = get_type_hints(_COMMANDS[name], include_extras=True)
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
    name, *words = arguments
    known = list(arguments_of(_COMMANDS[name]))
    required = {argument.name for argument in known if argument.is_required}
    if "config" not in required or not {*_HELP}.isdisjoint(words):
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
    return _end("error: unexpected, see the traceback above", FAILURE)


def _one_line(message: str) -> str:
    """Escape line ends and other control characters, and cut a message that would fill a screen."""
    shown = escaped(message)
    return shown if len(shown) <= _LONGEST_MESSAGE else f"{shown[:_LONGEST_MESSAGE]}..."


def _end(message: str, code: int) -> int:
    """Print the reason; in a run of several processes the others are told too, and end as well."""
    message = _one_line(message)
    with contextlib.suppress(OSError):  # nobody may be reading the output any more
        print(message, file=sys.stderr, flush=True)
    if "geojax.runtime" in sys.modules:
        sys.modules["geojax.runtime"].abort_job(message, code)
    return code
