"""`geojax plan`: what a person asks before a run, answered without an accelerator."""

from collections.abc import Sequence

from rich.console import Console

import geojax
from geojax.cli.escaping import escaped
from geojax.cli.plan_options import PlanCommand
from geojax.errors import UserError
from geojax.suggestions import shortened

_LONGEST_WORD = 200
"""Letters of an option that the first line shows."""


def announce(command: PlanCommand, overrides: Sequence[str]) -> None:
    """Print the first line of the page, before JAX is imported."""
    words = [str(command.config), *(shortened(each, _LONGEST_WORD) for each in overrides)]
    asked = escaped(" ".join(words))
    print(f"geojax {geojax.__version__}: plan of {asked}", flush=True)


def run(command: PlanCommand, overrides: Sequence[str]) -> int:
    """Print the page, write what is asked for, and return the exit code: 1 if it does not fit."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    from geojax.cli.plan_page import ConfigPage, print_model_page
    from geojax.cli.plan_request import is_run

    _check_outputs(command)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if is_run(command.config):
        return ConfigPage(command, overrides, console).print()
    return print_model_page(command, overrides, console)


def _check_outputs(command: PlanCommand) -> None:
    """Check, before anything is traced, that what is asked for can be written.

    Raises:
        UserError: a folder is missing or cannot be there, or a file's name is a folder's.
    """
    for option, path in {"--output": command.output, "--json": command.json_file}.items():
        if path is None:
            continue
        if path.is_dir():
            raise UserError(f"{option}: {path} is a folder; name a file in it")
        if not path.parent.is_dir():
            raise UserError(f"{option}: {path.parent} is no folder; name another one")
    folder = command.pictures
    if folder is not None:
        there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        if not there.is_dir():
            raise UserError(f"--pictures: {there} is no folder; name another one")
