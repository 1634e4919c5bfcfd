"""The functions that a run is handed: training imports no planner, simulator or decoder."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from geojax.config.run_config import RunConfig, SampleSettings
from geojax.data import Tokenizer
from geojax.data.corpus import OpenBuiltin
from geojax.islands.recording import Record
from geojax.models import AnyModel
from geojax.pipeline.schedule import Schedule
from geojax.step.plan import StepPlan
from geojax.step.resolved import Step
from geojax.step.step_file import Devices
from geojax.topology import Process, Topology

Log = Callable[[str], None]


class Resolve(Protocol):
    """Function that makes every choice of a run."""

    def __call__(
        self,
        config: RunConfig,
        topology: Topology | None,
        devices: Devices,
        log: Log,
    ) -> Step:
        """Resolve the step of `config`.

        Args:
            config: the run.
            topology: its sites, with the links as they are.
            devices: those of all sites, site by site.
            log: told of the progress.

        Raises:
            UserError: the layout cannot be.
        """
        ...


class CheckProducts(Protocol):
    """Function that checks that XLA multiplies in FP8 what a recipe asks for."""

    def __call__(
        self, programs: Sequence[jax.stages.Compiled], model: AnyModel, plan: StepPlan
    ) -> str | None:
        """Check programs that together run a layer forwards and backwards.

        Returns:
            Why nothing could be checked; None: all is well.

        Raises:
            UserError: there are fewer FP8 products than there should be.
        """
        ...


class DrawTimeline(Protocol):
    """Function that draws a recorded step beside the simulated one."""

    def __call__(
        self,
        schedule: Schedule,
        stages: Mapping[str, Record],
        image: Path,
        trace: Path,
        stages_per_site: int = 1,
    ) -> tuple[float, float]:
        """Draw a step.

        Args:
            schedule: of as many stages as there are records.
            stages: the record of each stage by its name, all by one clock.
            image: file of the picture.
            trace: file of the trace.
            stages_per_site: stages of every site.

        Returns:
            The seconds of the measured step and of the simulated one.
        """
        ...


class SampleTexts(Protocol):
    """Function that lets a trained model write."""

    def __call__(
        self,
        weights: Any,
        model: AnyModel,
        tokenizer: Tokenizer,
        settings: SampleSettings,
        seed: int,
    ) -> list[str]:
        """Continue each prompt of `settings`; the texts include the prompts."""
        ...


class LinkAdvice(Protocol):
    """Function that says which settings of the hosts suit their links better."""

    def __call__(
        self,
        topology: Topology,
        processes: Sequence[Process],
        own: int,
        environment: Mapping[str, str],
    ) -> list[str]:
        """Give advice, a line each, in one process of each site.

        Args:
            topology: the sites and their links.
            processes: all of the run.
            own: index of this process.
            environment: that of this process.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Services:
    """The functions that a run is handed: they decide, read programs, simulate and write."""

    resolve: Resolve
    check_products: CheckProducts
    draw_timeline: DrawTimeline
    sample_texts: SampleTexts
    open_builtin: OpenBuiltin
    link_advice: LinkAdvice
