"""The end of a case: where a command would compile, start processes, wait or change the machine.

All that comes before is run: reading and checking the config, making mesh and schedules, opening
data, reading weights and checkpoints, and the first batch. A command that reaches its boundary has
accepted its input.
"""

import importlib
from collections.abc import Callable
from typing import Any, NoReturn

ENDS = (
    "geojax.planner.memory:TracedStep.of",
    "geojax.pipeline.simulation.compare:compare",
    "geojax.probe:probe",
    "geojax.runtime.start:join",
    "geojax.runtime.rendezvous:join",
    "geojax.data.preparation.standard_library:prepare_standard_library",
    "geojax.cli.data_show:_print_json",
    "geojax.cli.launch:supervise",
    "geojax.cli.watch:_print_lines",
    "geojax.cli.watch:_show",
    "geojax.launch.hosts:_connected_to",
    "geojax.cli.wan:bring_up",
    "geojax.cli.wan:take_down",
    "geojax.cli.wan:cut",
    "geojax.cli.wan:restore",
    "geojax.inference.generation:_program",
    "geojax.inference.likelihood:_program",
    "jax.stages:Lowered.compile",
    "subprocess:Popen.__init__",
)
"""Functions, as module:name, that a case does not enter."""

PASSED_OVER = ("geojax.planner.resolve.resolve:trace_plan",)
"""Functions that trace the step, which takes longer than the checks behind them."""


class Accepted(BaseException):
    """The command reached its boundary."""


def _end(*arguments: object, **options: object) -> NoReturn:
    raise Accepted


def _pass(*arguments: object, **options: object) -> None:
    """Do nothing."""


def _unjudged(*arguments: object) -> Any:
    """Compare a step's memory with nothing."""
    from geojax.planner.resolve.preflight import Preflight
    from geojax.step.resolved import MemoryVerdict

    return Preflight(MemoryVerdict())


def _without_programs(
    cls: Any, config: Any, resolved: Any, plan: Any, *, sequences: int, **options: object
) -> Any:
    """Lay a run's state out, and compile nothing."""
    from geojax.optim import make_optimizer
    from geojax.train.compiled_run import state_layouts

    optimizer = make_optimizer(config.optimizer, config.steps)
    layouts = state_layouts(config.model, optimizer, plan)
    return cls(config, resolved, plan, layouts, optimizer, None, sequences)


def _read_weights(run: Any, weights: Any = None) -> NoReturn:
    """Read the weights that a run starts from, and nothing else of its state."""
    from geojax.checkpoint.reading.initial_weights import read_weights

    if weights is not None:
        layouts = run.layouts.parameters if run.layouts.frozen is None else run.layouts.frozen
        read_weights(weights, layouts, run.plan.mesh)
    raise Accepted


def _read_batches(loop: Any, begin: Callable[[], Any]) -> NoReturn:
    """Read the first batch of a run that goes on."""
    next(loop.opened.loader.iterate(begin().consumed_sequences))
    raise Accepted


REPLACED = {
    "geojax.planner.resolve.resolve:preflight": _unjudged,
    "geojax.train.compiled_run:CompiledRun.build": classmethod(_without_programs),
    "geojax.train.compiled_run:CompiledRun.fp8_programs": (),
    "geojax.train.run_state:begin": _read_weights,
    "geojax.train.training_loop:TrainingLoop.run": _read_batches,
}
"""Functions that a case goes through without what they compile."""


def close() -> None:
    """Put the boundary in place of the functions, in this process."""
    ends = dict.fromkeys(ENDS, _end) | dict.fromkeys(PASSED_OVER, _pass) | REPLACED
    for end, function in ends.items():
        module, _, name = end.partition(":")
        *owners, last = name.split(".")
        owner = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        assert hasattr(owner, last), f"{end} is not there any more"
        setattr(owner, last, function)
