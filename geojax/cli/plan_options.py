"""The options of `geojax plan`."""

from pathlib import Path
from typing import Annotated, Self

import pydantic
import tyro

from geojax.cli.simulated_pipeline import ScheduleOptions
from geojax.planner.search.choices import OpenChoices
from geojax.quantities import Count, Length, Tokens

NONE_NAMED = OpenChoices(roles=(), joins=(), precisions=(), compressions=())
"""The choices of a command line that names none."""


class PlanCommand(ScheduleOptions):
    """Say before a run if it fits, how long a step is, what crosses the link, and what is faster.

    With CONFIG, the page is about the config's own step, and about faster layouts of its model,
    topology, batch and precision. Options change settings: `--batch.global_batch_size 1024`. With
    MODEL (a preset or a YAML file), give --topology, --global-batch and --sequence-length; the page
    then has layouts alone. No accelerator is needed. Times are predicted, not measured. The exit
    code is 1 if `--compile` finds that the step does not fit.
    """

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG|MODEL")]
    """YAML file of a run, or name or YAML file of a model."""

    topology: str | None = None
    """Preset or YAML file of the sites; default: the config's."""

    global_batch: Count | None = None
    """Sequences of a step; default: the config's."""

    sequence_length: Length | None = None
    """Tokens of a sequence; default: the config's."""

    choices: Annotated[OpenChoices, tyro.conf.arg(name="")] = NONE_NAMED
    """Choices that are open to the search."""

    measured: bool = False
    """Take the rates of the topology as reached: `geojax probe` wrote it."""

    tokens: Annotated[Tokens | None, tyro.conf.arg(metavar="9T")] = None
    """Token budget, to predict the days of a run."""

    rows: int = pydantic.Field(default=8, ge=0, le=100)
    """Layouts in the table; 0: no search, with a CONFIG."""

    explain: Annotated[str | None, tyro.conf.arg(metavar="ROW|CONFIG")] = None
    """Print the terms of one layout: a row of the table, or the run in a YAML file."""

    trace: int = pydantic.Field(default=0, ge=0, le=100)
    """Number of layouts of the table, from the best on, whose memory is traced. Each takes
    seconds. The config's own step is always traced."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.yaml")] = None
    """File for the best layout that also fits by its trace, as a config that `geojax train`
    runs."""

    compile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compile the config's step ahead of time, and compare memory, messages and overlap with the
    plan."""

    target: Annotated[str | None, tyro.conf.arg(metavar="KIND:DEVICES")] = None
    """With --compile: h100:3072, or cpu:8 for simulated devices. Default: the accelerators of the
    config's topology. GPUs need the extra `aot` (jax[cuda13]), but no driver and no GPU."""

    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """File for all figures of the page."""

    pictures: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for pictures. step.png: the terms of the config's step, or with a MODEL of the best
    layout's. timeline.png: its pipeline at work. roles.png: each role's step time over bandwidth
    and round trip. With --schedules also timelines.png, lock-step.png, bandwidth.png and trace.json
    (for ui.perfetto.dev)."""

    @property
    def asks_for_layouts(self) -> bool:
        """True if an option is about the layouts of the search."""
        row = self.explain is not None and self.explain.isdecimal()
        return row or bool(self.trace) or self.output is not None or self.choices != NONE_NAMED

    @pydantic.model_validator(mode="after")
    def _options_go_together(self) -> Self:
        if self.stage_seconds is not None and self.stage_times is not None:
            raise ValueError("stage_seconds and stage_times say the same: leave one of them out")
        if self.target is not None and not self.compile:
            raise ValueError("--target requires --compile; add it, or remove --target")
        if not self.rows and self.asks_for_layouts:
            raise ValueError(
                "--rows 0 leaves out the search, of which another option asks; remove --rows 0"
            )
        if self.schedules is None:
            of_schedules = set(ScheduleOptions.model_fields) - {"schedules", "stage_times"}
            for name in sorted(of_schedules):
                if getattr(self, name) is not None:
                    option = f"--{name.replace('_', '-')}"
                    raise ValueError(f"{option} requires --schedules; add it, or remove {option}")
        return self
