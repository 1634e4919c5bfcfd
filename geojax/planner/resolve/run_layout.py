"""The layout of a run: read from its config, and written as settings of one."""

import dataclasses
from typing import Any

from geojax.config.run_config import RunConfig
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.step.plan import StepPlan


def planned_layout(config: RunConfig, plan: StepPlan) -> LayoutCandidate:
    """Return the layout of `config` with the layers and buckets that its step `plan` has."""
    return dataclasses.replace(
        layout_of_run(config),
        layers=plan.staged_layers.layers_per_chunk if plan.staged_layers else None,
        bucket_bytes=plan.bucket_bytes,
        overlap_grad_reduce=plan.overlap_grad_reduce,
        bucket_layers=plan.bucket_layers,
    )


def layout_of_run(config: RunConfig) -> LayoutCandidate:
    """Return the layout of `config`, with its layers; what it leaves to "auto" stays so."""
    mesh, pipeline, communication = config.mesh, config.pipeline, config.communication
    staged = chosen_layers(config)
    layout = LayoutCandidate(
        dc=mesh.dc,
        join=config.dc.join,
        dc_role=config.dc.role,
        pipeline_stages=config.pipeline_stages,
        virtual_stages=pipeline.virtual_stages,
        layers=None if staged is None else staged.layers_per_chunk,
        data=mesh.data,
        expert=mesh.expert,
        context=mesh.context,
        context_method=config.parallelism.context_method,
        tensor=mesh.tensor,
        sequence_parallel=config.parallelism.sequence,
        zero_stage=config.zero.stage,
        shard_across_sites=config.zero.across_sites,
        reshard_after_forward=config.zero.reshard_after_forward,
        microbatches=config.batch.microbatches,
        microbatch_size=1,
        remat=config.remat,
        schedule=pipeline.schedule,
        memory_limit=pipeline.memory_limit,
        hop_ticks=pipeline.hop_ticks,
        bucket_bytes=communication.bucket_bytes,
        overlap_grad_reduce=communication.overlap_grad_reduce,
        bucket_layers=communication.bucket_layers,
        gradient_compression=communication.gradient_compression,
        precision=config.precision,
    )
    size = config.batch.global_batch_size // layout.global_batch_size
    return dataclasses.replace(layout, microbatch_size=size)


def run_settings(layout: LayoutCandidate, sequence_length: int) -> dict[str, Any]:
    """Return the settings of a run config that make its layout `layout`.

    Args:
        layout: of sites that are alike.
        sequence_length: tokens of a sequence.
    """
    return layout.sections(sequence_length).model_dump(mode="json", exclude_unset=True)
