"""A recorded step of islands, drawn beside the simulated one."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from geojax.config.run_config import RunConfig
from geojax.islands.exchange import Exchange
from geojax.islands.recording import Record, as_words, by_one_clock, from_words
from geojax.islands.site_walks import SiteWalks
from geojax.islands.stage_lists import action_lists, data_schedule
from geojax.islands.stage_numbers import of_all_stages
from geojax.quantities import quantity
from geojax.step.resolved import Step
from geojax.train.services import DrawTimeline
from geojax.train.writing.background_writer import Put
from geojax.transport import Transport


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """A step of a site whose actions were timed, in role stage with those of all sites."""

    config: RunConfig
    """The run of all sites, for the batch of the step."""
    resolved: Step
    """Its choices, for the same batch."""
    stages: SiteWalks
    """The walk of each stage of the site in this process."""
    exchange: Exchange
    """The exchange with the other sites."""
    mesh: Mesh
    """The site's devices."""

    def draw(
        self,
        records: Sequence[Record],
        draw_timeline: DrawTimeline | None,
        transport: Transport,
        log: Callable[[str], None],
        put: Put,
    ) -> None:
        """Draw a step on the first process of the site; all processes of all sites call it.

        Args:
            records: what each stage of the site in this process has done.
            draw_timeline: draws it beside the simulated one; None: nothing is drawn.
            transport: the way to the other sites.
            log: shows a line to the user.
            put: takes the picture to be drawn and written.
        """
        site_names, count = transport.site_names, self.config.mesh.stage
        own = site_names[transport.site]
        if self.config.dc.role == "data":
            schedule = data_schedule(self.stages.walks[0].actions)
            names = [own]
        else:
            pipeline = self.resolved.pipeline
            assert pipeline is not None, "sites in role stage are stages"
            schedule = pipeline.as_schedule
            records = self._of_all_sites(records)
            names = [
                f"{name}.{stage}" if count > 1 else name
                for name in site_names
                for stage in range(count)
            ]
        if draw_timeline is None or jax.process_index() != 0:
            return
        folder = self.config.run_directory / own
        image, trace = folder / "timeline.png", folder / "timeline.json"
        named = dict(zip(names, records, strict=True))
        step = self.stages.walks[0].steps

        def draw() -> None:
            measured, simulated = draw_timeline(schedule, named, image, trace, count)
            log(
                f"step {step} after the start, {quantity(measured, 's')} and simulated "
                f"{quantity(simulated, 's')}, is drawn in {image} and {trace}"
            )

        put(image.name, draw)

    def _of_all_sites(self, records: Sequence[Record]) -> list[Record]:
        """Exchange the records of a step: those of all stages, by the clock of the first one."""
        lists, count = action_lists(self.config, self.resolved), self.config.mesh.stage
        words = dict(zip(self.stages.numbers, as_words(records, lists), strict=True))
        of_site = of_all_stages(words, self.mesh)
        of_stages = [
            record
            for site, each in self.exchange.of_hosts(of_site, self.mesh).items()
            for record in from_words(each, lists[count * site : count * (site + 1)])
        ]
        return by_one_clock(of_stages, count, len(records))
