"""How a run uses pipeline stages: its settings, and whether they fit the mesh and the model."""

from typing import Literal

import pydantic

from geojax.errors import UserError
from geojax.settings import Settings
from geojax.step.plan import DcRole

ScheduleName = Literal[
    "branch_free",
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zbv",
    "extended_warmup",
    "latency_hiding",
]

_ONE_CHUNK_A_STAGE = (
    "branch_free",
    "gpipe",
    "one_f_one_b",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "extended_warmup",
    "latency_hiding",
)


class PipelineSettings(Settings):
    """What stages do, and in which order; the microbatches are those of `batch.accumulation`."""

    dc_role: DcRole = "data"
    """What sites are to each other: "data", each has all stages and trains on its share of the
    batch; "stage", the pipeline runs through the sites, dc x stage stages in all."""

    schedule: ScheduleName = "branch_free"
    """The order in which stages go forwards and backwards. With "branch_free" idle stages compute
    on what nobody reads, so that the program needs no branches; it holds about twice the
    microbatches of "one_f_one_b"."""

    chunks: pydantic.PositiveInt = 1
    """Virtual stages: chunks of layers that each stage holds."""

    layers: tuple[pydantic.PositiveInt, ...] | None = None
    """Layers of each chunk, in the model's order; null: so that stages take about the same time."""

    hop_ticks: pydantic.PositiveInt = 1
    """Ticks from a stage's result to its use by the next stage, between sites where they are
    stages (inside a site it is one then). From two on, a message travels while others compute."""

    memory_limit: pydantic.PositiveInt | None = None
    """The most microbatches that a stage may have in flight; null: as many as the schedule has."""

    @pydantic.model_validator(mode="after")
    def _schedule_takes_the_chunks(self) -> "PipelineSettings":
        if self.schedule == "zbv" and self.chunks != 2:
            raise ValueError(
                f"chunks={self.chunks}, but schedule zbv folds the model in two: chunks must be 2"
            )
        if self.schedule in _ONE_CHUNK_A_STAGE and self.chunks != 1:
            raise ValueError(
                f"chunks={self.chunks}, but with schedule {self.schedule} a stage holds one chunk; "
                "leave it 1 or choose interleaved or zbv"
            )
        return self

    def stages(self, *, dc: int, stage: int) -> int:
        """The stages of the whole pipeline on a mesh of these sizes; 1 where there is none."""
        return dc * stage if self.dc_role == "stage" else stage


def check_stages(settings: PipelineSettings, *, dc: int, stage: int, layers: int) -> None:
    """Refuse stages that the model's layers cannot be shared among; touches no device.

    Args:
        settings: how the stages are used.
        dc, stage: sizes of the mesh's axes.
        layers: of the model.

    Raises:
        UserError: there are more chunks than layers, `settings.layers` does not cut the model into
            its chunks, or there are chunks but no stages; with what would work.
    """
    stages = settings.stages(dc=dc, stage=stage)
    chunks = stages * settings.chunks
    if stages == 1 and (settings.chunks > 1 or settings.layers):
        raise UserError(
            f"pipeline: {'chunks' if settings.chunks > 1 else 'layers'} is about stages, and there "
            "is one: raise mesh.stage, or set dc_role to stage on two sites"
        )
    factors = {"mesh.dc": dc if settings.dc_role == "stage" else 1, "mesh.stage": stage}
    factors["pipeline.chunks"] = settings.chunks
    product = " x ".join(f"{name}={size}" for name, size in factors.items() if size > 1)
    if chunks > layers:
        fitting = f"chunks can be up to {layers // stages}" if stages <= layers else ""
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
            f"pipeline.layers={list(settings.layers)} is {sum(settings.layers)} layers in "
            f"{len(settings.layers)} chunks, and the model has {layers} layers in {product} = "
            f"{chunks} chunks; {such_as} would work"
        )
