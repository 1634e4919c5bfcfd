"""`geojax config`: show, compare, begin and describe the configs of runs."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from geojax.cli.config_file import ConfigFile
from geojax.errors import UserError
from geojax.paths import shown_path
from geojax.run_paths import CONFIG


@dataclasses.dataclass(frozen=True)
class ShowCommand:
    """Show a config with all of its keys, and where each value is from.

    The source is a line of a file, an option, a preset, or the default. A value of auto is shown
    with what a run resolves it to, by the topology. The output is a config itself.
    """

    config: ConfigFile
    """YAML file of a run."""


@dataclasses.dataclass(frozen=True)
class DiffCommand:
    """Show the keys in which two configs differ, side by side.

    Both are compared with their bases, presets and defaults.
    """

    first: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """YAML file of a run, or run directory."""

    second: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """YAML file of a run, or run directory."""


@dataclasses.dataclass(frozen=True)
class NewCommand:
    """Write a config to start from, with comments: one that trains as it is, on one device."""

    model: str = "tiny"
    """Preset of the model."""

    output: Path | None = None
    """File to write; default: stdout. A file that is there is never replaced."""


@dataclasses.dataclass(frozen=True)
class SchemaCommand:
    """Print the JSON schema of a config, by which an editor checks and completes one."""


ConfigCommand = ShowCommand | DiffCommand | NewCommand | SchemaCommand


def run(command: ConfigCommand, overrides: Sequence[str] = ()) -> int:
    """Run the command, and return the exit code 0."""
    if isinstance(command, ShowCommand):
        from geojax.cli.config_sources import sourced_config

        print("\n".join(sourced_config(command.config, overrides)))
    elif isinstance(command, DiffCommand):
        _print_difference(command)
    elif isinstance(command, NewCommand):
        _write_new(command)
    else:
        from geojax.config.schema import config_schema

        print(json.dumps(config_schema(), indent=2))
    return 0


def _print_difference(command: DiffCommand) -> None:
    from rich.console import Console
    from rich.table import Table

    from geojax.cli.help_pages import terminal_width

    first, second = _leaves(command.first), _leaves(command.second)
    table = Table("key", command.first, command.second, box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for key in dict.fromkeys([*first, *second]):
        if first.get(key) != second.get(key):
            table.add_row(key, first.get(key, ""), second.get(key, ""))
    if not table.row_count:
        print("the configs are the same")
        return
    Console(highlight=False, markup=False, width=terminal_width()).print(table)


def _leaves(name: str) -> dict[str, str]:
    """Return the values of a config as YAML, by dotted key."""
    from geojax.config.run_config import RunConfig
    from geojax.paths import expanded_path
    from geojax.settings import leaves_by_key
    from geojax.yaml_syntax import one_line

    path = expanded_path(name)
    if path.is_dir():
        path /= CONFIG
        if not path.is_file():
            raise UserError(f"{name}: holds no config.yaml; a run directory of geojax would do")
    config = RunConfig.load(path).model_dump(mode="json")
    return {key: one_line(value) for key, value in leaves_by_key(config)}


def _write_new(command: NewCommand) -> None:
    from geojax.cli.new_config import new_config

    text = new_config(command.model, command.output)
    if command.output is None:
        print(text, end="")
        return
    shown = shown_path(command.output)
    try:
        with command.output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"--output: {shown} is there; name a new file") from None
    except OSError as error:
        raise UserError(f"--output: {shown} cannot be written ({error.strerror})") from None
    print(f"{shown} is written; geojax train {shown} trains it")
