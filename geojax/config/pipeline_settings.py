"""The settings of pipeline stages, checked against the mesh and the model."""

from typing import Annotated, Literal

import pydantic

from geojax.config.layout_sections import BatchSettings
from geojax.errors import UserError
from geojax.layout_names import DcRole, Join
from geojax.pipeline.registry import schedule_entry, schedules_with
from geojax.quantities import Bytes, Count
from geojax.settings import AUTO, NUMBER, UNLESS_AUTO, Settings
from geojax.suggestions import listed

ScheduleName = Annotated[str, pydantic.AfterValidator(lambda name: schedule_entry(name).name)]
"""The name of an entry in `geojax.pipeline.registry`."""


class DcSettings(Settings):
    """Role of the sites in a run."""

    role: DcRole = "data"
    """"data": every site has all layers and trains on its share of the batch. "stage": one pipeline
    runs through the sites, in mesh.dc x mesh.stage stages."""

    join: Join = "one_program"
    """"one_program": one JAX runtime spans all sites. "islands": every site is a job of its own
    (see docs/islands.md). TCP connections move gradients between them, or activations in
    role "stage". In role "data" an island computes as many microbatches at once as fit, or as
    `pipeline.memory_limit` or `pipeline.memory_limit_bytes` allow."""

    timeline_step: Annotated[int, pydantic.Field(ge=2, le=10**9)] | None = None
    """Step after each start whose measured timeline every island draws beside the simulated one.
    timeline.png and timeline.json (for ui.perfetto.dev) lie in its run directory. In role "stage"
    they show the stages of all sites. This step runs action by action and takes longer. null:
    none."""


class PipelineSettings(Settings):
    """The order of the stages' work on the microbatches of `batch.microbatches`."""

    schedule: ScheduleName = "branch_free"
    """Pipeline schedule: "branch_free", "gpipe", "1f1b", "geopipe", "interleaved",
    "zero_bubble_h1", "zero_bubble_h2", "zbv", "latency_hiding" or "latency_hiding_split". With
    "branch_free" idle stages compute on unused data, so that the program needs no branches. It
    holds about twice the microbatches of "1f1b"."""

    virtual_stages: Count = 1
    """Chunks of layers that each stage holds."""

    layers: tuple[Count, ...] | None = None
    """Layers of each chunk, in the model's order. null: balance the stages' times."""

    head: Literal["auto", "last_stage", "positions", "vocabulary"] = "auto"
    """Stages that run the head. "last_stage": the last one, for which the others wait. "positions":
    all of the last one's site, each for its share of every microbatch's positions. "vocabulary":
    all stages, each for its share of the vocabulary, with the table of tokens too: a device holds
    as much less of both. Neither with islands or modules for later tokens; "vocabulary" in role
    "data" alone, and not for models of your own or first dense layers. "auto": the fastest by the
    peaks of the accelerators, on GPUs; otherwise "last_stage"."""

    hop_ticks: Annotated[
        Annotated[int, pydantic.Field(ge=1, le=1024), NUMBER] | AUTO, UNLESS_AUTO
    ] = "auto"
    """Ticks from a stage's result to its use by the next stage. Where sites are stages, this counts
    between sites; inside a site a hop takes one tick. From two ticks on, a message travels during
    compute. "auto": one or two, whichever is faster by the topology's link and peaks; one if these
    are unknown."""

    memory_limit: Count | None = None
    """The most microbatches that a stage may have in flight. null: as many as the schedule has."""

    memory_limit_bytes: Bytes | None = None
    """The most bytes that a stage's layers may hold on a device for microbatches in flight. These
    are residuals and, with split backward passes, the inputs of delayed weight gradients. null: as
    many as the schedule's forwards need; weight gradients come early enough to need no more."""

    @pydantic.model_validator(mode="after")
    def _schedule_takes_the_chunks(self) -> "PipelineSettings":
        needed = schedule_entry(self.schedule).virtual_stages
        if needed not in (None, self.virtual_stages):
            raise ValueError(
                f"schedule {self.schedule} requires virtual_stages={needed}; got "
                f"{self.virtual_stages}, which {', '.join(schedules_with(self.virtual_stages))} "
                "can have"
            )
        return self


MOST_MICROBATCHES = 2**13
"""Most microbatches of a pipeline: the orders of some schedules take quadratic time in them."""

MOST_SCHEDULED = 2**17
"""Most microbatches of all chunks for which a schedule is made. The limit is 128 stages of 4 chunks
and 256 microbatches; such a schedule takes about ten seconds of one core."""


def check_scheduled(chunks: int, microbatches: int) -> None:
    """Refuse a schedule that would take minutes and many gigabytes to make.

    Raises:
        UserError: there are too many microbatches, alone or of too many chunks.
    """
    most = min(MOST_MICROBATCHES, max(1, MOST_SCHEDULED // chunks))
    if microbatches > most:
        raise UserError(
            f"pipeline: batch.microbatches={microbatches} is more than a schedule for {chunks} "
            f"chunks is made for; it can be up to {most}"
        )


def check_ramp_scheduled(chunks: int, batch: BatchSettings) -> None:
    """Refuse a ramp whose schedules together would take as long as one that `check_scheduled` does.

    Raises:
        UserError: there are too many microbatches in the sizes of the ramp.
    """
    counts = [batch.microbatches_of(size) for size in batch.sizes.smaller]
    most = max(batch.microbatches, MOST_SCHEDULED // chunks)
    if sum(counts) > most:
        raise UserError(
            f"pipeline: the {len(counts)} sizes of batch.ramp have {sum(counts)} microbatches "
            f"together, and schedules for {chunks} chunks are made for up to {most}; a larger "
            "increment has fewer sizes"
        )


def check_stages(settings: PipelineSettings, *, sites: int, stage: int, layers: int) -> None:
    """Refuse stages that the model's layers cannot be shared among; touches no device.

    Args:
        settings: how the stages are used.
        sites: the number of sites that one pipeline runs through.
        stage: size of the mesh axis.
        layers: of the model.

    Raises:
        UserError: there are more chunks than layers, `settings.layers` does not cut the model into
            its chunks, or there are chunks but no stages; with what would work.
    """
    stages = sites * stage
    chunks = stages * settings.virtual_stages
    if stages == 1 and (settings.virtual_stages > 1 or settings.layers):
        given = "virtual_stages" if settings.virtual_stages > 1 else "layers"
        raise UserError(
            f"pipeline.{given} requires two stages or more; got 1. Raise mesh.stage, or set "
            "dc.role to stage on two sites"
        )
    factors = {"mesh.dc": sites, "mesh.stage": stage}
    factors["pipeline.virtual_stages"] = settings.virtual_stages
    product = " x ".join(f"{name}={size}" for name, size in factors.items() if size > 1)
    if chunks > layers:
        fitting = f"virtual_stages can be up to {layers // stages}" if stages <= layers else ""
        raise UserError(
            f"pipeline: {product} = {chunks} chunks need a layer each, and the model has {layers}; "
            + (fitting or f"{layers} stages are the most")
        )
    if settings.layers is None:
        return
    if len(settings.layers) != chunks or sum(settings.layers) != layers:
        shorter, longer = layers // chunks, layers % chunks
        such_as = [shorter + 1] * longer + [shorter] * (chunks - longer)
        raise UserError(
            f"pipeline.layers=[{listed(settings.layers)}] is {sum(settings.layers)} layers in "
            f"{len(settings.layers)} chunks, and the model has {layers} layers in {product} = "
            f"{chunks} chunks; [{listed(such_as)}] would work"
        )
