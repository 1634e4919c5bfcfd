"""The pipeline that `geojax plan --schedules` looks at, by a config and the command's options."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import pydantic
import tyro

from geojax.errors import UserError
from geojax.pipeline.registry import SCHEDULES, schedule_entry
from geojax.quantities import Count, Seconds
from geojax.settings import Settings
from geojax.suggestions import listed

if TYPE_CHECKING:
    from geojax.config.run_config import RunConfig
    from geojax.planner.cost.calibration import Calibration
    from geojax.planner.staged_pipeline import StagedPipeline
    from geojax.topology import Topology


class ScheduleOptions(Settings):
    """Options of the comparison of pipeline schedules."""

    schedules: Annotated[
        tuple[str, ...] | None,
        tyro.conf.arg(
            metavar="NAME",
            help="Pipeline schedules to compare; without names: all.\n\n"
            + "\n".join(f"{entry.name}: {entry.description}" for entry in SCHEDULES.values()),
        ),
    ] = None
    """Pipeline schedules to compare; without names: all."""
    stages_per_site: Count | None = None
    """With --schedules: pipeline stages in each site; default: mesh.stage."""
    microbatches: Count | None = None
    """With --schedules: microbatches of a rank; default: batch.microbatches, or if that is 1, one
    per sequence."""
    memory_limit: Count | None = None
    """With --schedules: most microbatches that a stage may hold; default: pipeline.memory_limit, or
    the number of stages, as in 1F1B."""
    virtual_stages: Count | None = None
    """With --schedules: virtual stages of the interleaved schedule; default:
    pipeline.virtual_stages, at least 2."""
    accelerator: str | None = None
    """With --schedules: accelerator of every site, in place of the topology's (h100-sxm,
    ascend-910b ...)."""
    efficiency: Annotated[float, pydantic.Field(ge=0.001, le=1)] | None = None
    """With --schedules: share of its peak that an accelerator reaches in large matrix products;
    default: as fitted to published runs."""
    stage_seconds: Annotated[Seconds, pydantic.Field(ge=1e-6, le=1e4)] | None = None
    """With --schedules: measured time of a stage for a microbatch's forward and backward, such as
    180ms, in place of peak and efficiency."""
    stage_times: Path | None = None
    """YAML file of the times that `geojax probe` measured for the model's pieces, in place of
    published peaks. The plan then holds only layouts with the measured sequences, tensor ranks and
    so on."""


class PipelineSizes(NamedTuple):
    """Sizes of a simulated pipeline: those that were given, or else the config's."""

    stages_per_site: int
    microbatches: int
    memory_limit: int
    virtual_stages: int


MOST_STAGES_A_HOP = 256
"""Most times that a message between stages may take as long as a stage does for a microbatch."""


class SimulatedPipeline(NamedTuple):
    """A pipeline whose schedules are compared."""

    config: "RunConfig"
    topology: "Topology"
    """All sites of the config, with the accelerators that are asked for."""
    staged: "StagedPipeline"
    """The pipeline through all sites, or inside the site where it takes longest."""
    sizes: PipelineSizes
    source: str
    """Source of the times."""

    @classmethod
    def of(
        cls, config: "RunConfig", options: ScheduleOptions, calibration: "Calibration"
    ) -> "SimulatedPipeline":
        """Return the pipeline of `config`.

        Args:
            config: the run.
            options: of the command line.
            calibration: what accelerators and networks reach of their published rates, where no
                option says it.

        Raises:
            UserError: an option is not possible, or the topology does not say enough.
        """
        topology = _topology(config, options.accelerator)
        for name in options.schedules or ():
            schedule_entry(name)  # refuses a schedule that there is not
        sizes = _sizes(config, options, len(topology.sites))
        staged = _staged(config, topology, options, sizes, calibration)
        _check_hops(staged)
        return cls(config, topology, staged, sizes, _source(options))

    @property
    def pipelines(self) -> int:
        """Pipelines of the whole run: one, or one in each site."""
        return len(self.topology.sites) // len(self.staged.topology.sites)


def _source(options: ScheduleOptions) -> str:
    if options.stage_times is not None:
        return f"the times in {options.stage_times}"
    if options.stage_seconds is not None:
        return "--stage-seconds"
    if options.efficiency is not None:
        return f"the cost model, products at {options.efficiency:.0%} of the peaks (--efficiency)"
    return "the cost model"


def _check_hops(staged: "StagedPipeline") -> None:
    """Refuse links that no schedule hides, and for which tables of ticks would grow without end.

    Raises:
        UserError: a hop is too long for the stages' work.
    """
    from geojax.pipeline.schedule import Placement

    costs = staged.costs(Placement.linear(staged.stages))
    work = max(costs.work)
    longest = max(costs.hops, key=lambda hop: hop.seconds, default=None)
    if longest is not None and longest.seconds > MOST_STAGES_A_HOP * work:
        raise UserError(
            f"--schedules: a hop over {longest.link or 'a site'} takes {longest.seconds:.3g} "
            f"s, more than {MOST_STAGES_A_HOP} times the {work:.3g} s of a stage for a microbatch. "
            "Compare with a larger model, longer microbatches or a faster link"
        )


def _topology(config: "RunConfig", accelerator: str | None) -> "Topology":
    """Return the config's topology, with the accelerators of that name if one is given.

    Raises:
        UserError: the config has none, its mesh has other sites, or there is no such accelerator.
    """
    from geojax.accelerators import accelerator_named
    from geojax.mesh import require_sites

    topology = config.load_topology()
    if topology is None:
        raise UserError("--schedules requires a topology; add --topology two-h100-sites, say")
    require_sites(topology, config.mesh.dc)
    if accelerator is None:
        return topology
    changes = {"accelerator": accelerator_named(accelerator)}
    sites = tuple(site.model_copy(update=changes) for site in topology.sites)
    return topology.model_copy(update={"sites": sites})


def _sizes(config: "RunConfig", options: ScheduleOptions, sites: int) -> PipelineSizes:
    """Return the sizes that are given, and the others out of the config.

    Raises:
        UserError: the batch does not divide into the microbatches.
    """
    from geojax.config.pipeline_settings import check_scheduled

    stages_per_site = options.stages_per_site or config.mesh.stage
    through_sites = through_all_sites(config, stages_per_site)
    stages = stages_per_site * (sites if through_sites else 1)
    sequences = sequences_per_rank(config, through_sites)
    of_config = config.batch.microbatches if config.batch.microbatches > 1 else sequences
    sizes = PipelineSizes(
        stages_per_site,
        options.microbatches or of_config,
        options.memory_limit or config.pipeline.memory_limit or stages,
        options.virtual_stages or max(2, config.pipeline.virtual_stages),
    )
    check_scheduled(stages * sizes.virtual_stages, sizes.microbatches)
    if sequences % sizes.microbatches:
        fitting = [count for count in range(1, sequences + 1) if sequences % count == 0]
        raise UserError(
            f"microbatches={sizes.microbatches} does not divide the {sequences} sequences of "
            f"each of the {config.batch.global_batch_size // sequences} data-parallel ranks; "
            f"{listed(fitting)} would"
        )
    return sizes


def has_pipeline(config: "RunConfig") -> bool:
    """Tell whether a training run would have a pipeline."""
    return config.pipeline_stages > 1


def through_all_sites(config: "RunConfig", stages_per_site: int) -> bool:
    """Tell whether sites hold stages of one pipeline; always where each has one stage only."""
    return config.dc.role == "stage" or stages_per_site == 1


def given_hop_ticks(config: "RunConfig") -> int | None:
    """Return the ticks of hops between sites, if the config names them."""
    ticks = config.pipeline.hop_ticks
    return None if ticks == "auto" else ticks


def sequences_per_rank(config: "RunConfig", through_sites: bool) -> int:
    """Return the sequences of a batch on each rank that has sequences of its own.

    Raises:
        UserError: they do not divide.
    """
    sizes = {} if through_sites else {"dc": config.mesh.dc}
    sizes |= {"data": config.mesh.data, "expert": config.mesh.expert}
    ranks = math.prod(sizes.values())
    batch = config.batch.global_batch_size
    if batch % ranks:
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise UserError(
            f"batch.global_batch_size={batch} does not divide over {product} = {ranks}; "
            f"{-(-batch // ranks) * ranks} would"
        )
    return batch // ranks


def microbatch_sequences(config: "RunConfig") -> int:
    """Rows of a microbatch on each rank, where the command does not say how many there are.

    Raises:
        UserError: they do not divide.
    """
    sequences = sequences_per_rank(config, through_all_sites(config, config.mesh.stage))
    return sequences // config.batch.microbatches if config.batch.microbatches > 1 else 1


def _staged(
    config: "RunConfig",
    topology: "Topology",
    options: ScheduleOptions,
    sizes: PipelineSizes,
    calibration: "Calibration",
) -> "StagedPipeline":
    """Return the pipeline through all sites, or inside the site where it takes longest.

    Raises:
        UserError: it has one stage only, or cannot be had (`StagedPipeline`).
    """
    from geojax.pipeline.schedule import Placement
    from geojax.planner.cost.layout import LayoutCandidate
    from geojax.planner.staged_pipeline import StagedPipeline

    if options.efficiency is not None:
        calibration = dataclasses.replace(
            calibration, matmul_efficiency={}, other_matmul_efficiency=options.efficiency
        )
    through_sites = through_all_sites(config, sizes.stages_per_site)
    whole = [topology]
    if not through_sites:
        whole = [
            topology.model_copy(update={"sites": (site,), "links": ()}) for site in topology.sites
        ]
    layout = LayoutCandidate.of(config).changed(
        mesh={"dc": len(whole[0].sites), "stage": sizes.stages_per_site},
        dc={"role": "stage" if through_sites else "data"},
    )
    size = sequences_per_rank(config, through_sites) // sizes.microbatches
    layout = layout.with_microbatches(sizes.microbatches, size)
    pipelines = [
        StagedPipeline(config.model, layout, each, calibration, options.stage_seconds)
        for each in whole
    ]
    stages = layout.pipeline_stages
    if stages == 1:
        raise UserError(
            "one stage is no pipeline: raise mesh.stage, or give --stages-per-site, such as 2"
        )

    def period(pipeline: StagedPipeline) -> float:
        costs = pipeline.costs(Placement.linear(stages))
        return max(costs.work)

    return max(pipelines, key=period)
