"""The end of a case: where a command would compile, start processes, wait or change the machine.

All that comes before is run: reading and checking the config, making mesh and schedules, opening
data. A command that reaches its boundary has accepted its input.
"""

import importlib
from typing import NoReturn

ENDS = (
    "geojax.train.compiled_run:CompiledRun.build",
    "geojax.planner.memory:TracedStep.of",
    "geojax.pipeline.simulation.compare:compare",
    "geojax.probe:probe",
    "geojax.runtime.start:join",
    "geojax.data.corpus:prepare_standard_library",
    "geojax.cli.launch:supervise",
    "geojax.launch.hosts:_connected_to",
    "geojax.cli.wan:bring_up",
    "geojax.cli.wan:take_down",
    "geojax.cli.wan:cut",
    "geojax.cli.wan:restore",
    "jax.stages:Lowered.compile",
    "subprocess:Popen.__init__",
)
"""Functions, as module:name, that a case does not enter."""

PASSED_OVER = ("geojax.train.run:require_memory",)
"""Functions that trace the step, which takes longer than the checks behind them."""


class Accepted(BaseException):
    """The command reached its boundary."""


def _end(*arguments: object, **options: object) -> NoReturn:
    raise Accepted


def _pass(*arguments: object, **options: object) -> None:
    """Do nothing."""


def close() -> None:
    """Put the boundary in place of the functions, in this process."""
    for end in (*ENDS, *PASSED_OVER):
        module, _, name = end.partition(":")
        *owners, last = name.split(".")
        owner = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        assert hasattr(owner, last), f"{end} is not there any more"
        setattr(owner, last, _end if end in ENDS else _pass)
