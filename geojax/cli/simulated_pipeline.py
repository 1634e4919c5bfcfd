"""The pipeline that `geojax simulate` looks at, by a config and the command's options."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import pydantic

from geojax.errors import UserError
from geojax.quantities import Count, Seconds
from geojax.settings import Settings, validate
from geojax.suggestions import listed

if TYPE_CHECKING:
    from geojax.config.run_config import RunConfig
    from geojax.pipeline.simulation.staged_model import StagedModel
    from geojax.topology import Topology


class Options(Settings):
    """The numbers of the command, checked."""

    stages_per_site: Count
    microbatches: Count
    memory_limit: Count
    virtual_stages: Count
    efficiency: float = pydantic.Field(ge=0.001, le=1)
    stage_seconds: Annotated[Seconds, pydantic.Field(ge=1e-6, le=1e4)] | None
    stage_times: Path | None

    @pydantic.model_validator(mode="after")
    def _one_measurement(self) -> Self:
        if self.stage_seconds is not None and self.stage_times is not None:
            raise ValueError("stage_seconds and stage_times say the same: leave one of them out")
        return self


MOST_STAGES_A_HOP = 256
"""Most times that a message between stages may take as long as a stage does for a microbatch."""


def check_hops(staged: "StagedModel") -> None:
    """Refuse links that no schedule hides, and for which tables of ticks would grow without end.

    Raises:
        UserError: a hop is too long for the stages' work.
    """
    from geojax.pipeline.schedule import Placement

    costs = staged.costs(Placement.linear(staged.stages))
    work = max(map(sum, zip(costs.forward, costs.backward, costs.weight, strict=True)))
    longest = max(costs.hops, key=lambda hop: hop.seconds, default=None)
    if longest is not None and longest.seconds > MOST_STAGES_A_HOP * work:
        raise UserError(
            f"geojax simulate: a hop over {longest.link or 'a site'} takes {longest.seconds:.3g} "
            f"s, more than {MOST_STAGES_A_HOP} times the {work:.3g} s of a stage for a microbatch. "
            "Simulate a larger model, longer microbatches or a faster link"
        )


def topology_of(config: "RunConfig", accelerator: str | None) -> "Topology":
    """Return the config's topology, with the accelerators of that name if one is given.

    Raises:
        UserError: the config has none, its mesh has other sites, or there is no such accelerator.
    """
    from geojax.accelerators import accelerator_named
    from geojax.mesh import require_sites

    topology = config.load_topology()
    if topology is None:
        raise UserError("topology: is needed to simulate, such as --topology two-h100-sites")
    require_sites(topology, config.mesh.dc)
    if accelerator is None:
        return topology
    changes = {"accelerator": accelerator_named(accelerator)}
    sites = tuple(site.model_copy(update=changes) for site in topology.sites)
    return topology.model_copy(update={"sites": sites})


def options_of(command: Mapping[str, Any], config: "RunConfig", sites: int) -> Options:
    """Return the command's numbers, each that is None taken out of the config.

    Raises:
        UserError: one of them is not possible, or the batch does not divide into the microbatches.
    """
    from geojax.config.pipeline_settings import check_scheduled

    given = {name: command[name] for name in Options.model_fields}
    if given["stages_per_site"] is None:
        given["stages_per_site"] = config.mesh.stage
    through_sites = through_all_sites(config, given["stages_per_site"])
    sequences = sequences_per_rank(config, through_sites)
    if given["microbatches"] is None:
        microbatches = config.batch.microbatches
        given["microbatches"] = microbatches if microbatches > 1 else sequences
    if given["memory_limit"] is None:
        stages = given["stages_per_site"] * (sites if through_sites else 1)
        given["memory_limit"] = config.pipeline.memory_limit or stages
    if given["virtual_stages"] is None:
        given["virtual_stages"] = max(2, config.pipeline.virtual_stages)
    options = validate(Options, given, "geojax simulate")
    stages = options.stages_per_site * (sites if through_sites else 1)
    check_scheduled(stages * options.virtual_stages, options.microbatches)
    if sequences % options.microbatches:
        fitting = [count for count in range(1, sequences + 1) if sequences % count == 0]
        raise UserError(
            f"microbatches={options.microbatches} does not divide the {sequences} sequences of "
            f"each of the {config.batch.global_batch_size // sequences} data-parallel ranks; "
            f"{listed(fitting)} would"
        )
    return options


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


def staged_model(config: "RunConfig", topology: "Topology", options: Options) -> "StagedModel":
    """Return the pipeline through all sites, or inside the site where it takes longest.

    Raises:
        UserError: it has one stage only, or cannot be had (`StagedModel`).
    """
    from geojax.pipeline.schedule import Placement
    from geojax.pipeline.simulation.stage_times import StageTimes
    from geojax.pipeline.simulation.staged_model import StagedModel
    from geojax.precision import policy

    measured = StageTimes.load(options.stage_times) if options.stage_times else None
    through_sites = through_all_sites(config, options.stages_per_site)
    whole = [topology]
    if not through_sites:
        whole = [
            topology.model_copy(update={"sites": (site,), "links": ()}) for site in topology.sites
        ]
    pipelines = [
        StagedModel(
            config.model,
            of_pipeline,
            options.stages_per_site,
            sequences=sequences_per_rank(config, through_sites) // options.microbatches,
            sequence_length=config.batch.sequence_length,
            data=config.mesh.data * config.mesh.expert,
            parallelism=config.model_parallelism,
            dtype=policy(config.precision).compute_dtype.name,
            remat=config.remat,
            efficiency=options.efficiency,
            stage_seconds=options.stage_seconds,
            measured=measured,
            given_layers=config.pipeline.layers,
        )
        for of_pipeline in whole
    ]
    stages = pipelines[0].stages
    if stages == 1:
        raise UserError(
            "one stage is no pipeline: raise mesh.stage, or give --stages-per-site, such as 2"
        )

    def period(staged: StagedModel) -> float:
        costs = staged.costs(Placement.linear(stages))
        return max(map(sum, zip(costs.forward, costs.backward, costs.weight, strict=True)))

    return max(pipelines, key=period)
