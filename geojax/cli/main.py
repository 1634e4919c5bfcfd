"""The entry point: finds the verb, runs it, and turns a user's mistake into one line."""

import contextlib
import sys
import traceback
from typing import Annotated

import tyro

from geojax.cli import data, launch, memory, probe, simulate, train, wan
from geojax.errors import RunError, UserError
from geojax.exit_codes import FAILURE, INTERRUPTED, USAGE

Verb = (
    Annotated[train.TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[memory.MemoryCommand, tyro.conf.subcommand("memory")]
    | Annotated[simulate.SimulateCommand, tyro.conf.subcommand("simulate")]
    | Annotated[probe.ProbeCommand, tyro.conf.subcommand("probe")]
    | Annotated[data.PrepareCommand, tyro.conf.subcommand("data prepare")]
    | Annotated[launch.LaunchCommand, tyro.conf.subcommand("launch")]
    | Annotated[wan.WanUpCommand, tyro.conf.subcommand("wan up")]
    | Annotated[wan.WanDownCommand, tyro.conf.subcommand("wan down")]
    | Annotated[wan.WanStatusCommand, tyro.conf.subcommand("wan status")]
    | Annotated[wan.WanCutCommand, tyro.conf.subcommand("wan cut")]
    | Annotated[wan.WanMendCommand, tyro.conf.subcommand("wan mend")]
)


def main() -> None:
    """Run the `geojax` command with this process's arguments, and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one verb and return the exit code."""
    if arguments[:1] in (["data"], ["wan"]):  # a verb of two words
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    launched: list[str] = []
    if arguments[:1] == ["launch"] and "--" in arguments:  # what follows is another command's
        separator = arguments.index("--")
        arguments, launched = arguments[:separator], arguments[separator + 1 :]
    verb, unknown = tyro.cli(
        Verb,
        prog="geojax",
        description="Train transformers across data centres.",
        args=arguments,
        return_unknown_args=True,
    )
    try:
        if isinstance(verb, train.TrainCommand):
            return train.run(verb, unknown)
        if isinstance(verb, memory.MemoryCommand):
            return memory.run(verb, unknown)
        if isinstance(verb, simulate.SimulateCommand):
            return simulate.run(verb, unknown)
        if isinstance(verb, probe.ProbeCommand):
            return probe.run(verb, unknown)
        if unknown:
            raise UserError(f"unknown argument {unknown[0]}; see geojax {arguments[0]} --help")
        if isinstance(verb, launch.LaunchCommand):
            return launch.run(verb, launched)
        if isinstance(verb, wan.WanCommand):
            return wan.run(verb)
        return data.run(verb)
    except UserError as error:
        return _give_up(f"error: {error}", USAGE)
    except RunError as error:
        return _give_up(f"error: {error}", FAILURE)
    except KeyboardInterrupt:
        return _give_up("interrupted", INTERRUPTED)
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return _give_up("error: unexpected, see the traceback above", FAILURE)


def _give_up(message: str, code: int) -> int:
    """Say why; in a run of several processes the others are told too, and end as well."""
    with contextlib.suppress(OSError):  # nobody may be listening any more
        print(message, file=sys.stderr, flush=True)
    if "geojax.runtime" in sys.modules:
        sys.modules["geojax.runtime"].abort_job(message, code)
    return code
