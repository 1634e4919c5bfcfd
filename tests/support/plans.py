"""Plans of steps on a mesh, in layouts that nothing validates: a step can do more than runs ask."""

import math
from typing import Any

from jax.sharding import Mesh

from geojax.config.layout import Layout
from geojax.config.layout_sections import (
    BatchSettings,
    CommunicationSettings,
    MeshSettings,
    ParallelismSettings,
    ZeroSettings,
)
from geojax.config.pipeline_settings import DcSettings, PipelineSettings
from geojax.layout_names import DcRole
from geojax.models.chunk.remat import Remat
from geojax.models.parallel.parallelism import ContextMethod
from geojax.precision import Policy
from geojax.step.plan import StepPlan


def step_plan_on(
    mesh: Mesh,
    policy: Policy,
    microbatches: int = 1,
    *,
    remat: Remat = "none",
    sequence_parallel: bool = False,
    chunks: int = 1,
    context_method: ContextMethod = "ring",
    zero_stage: int = 1,
    shard_across_sites: bool = False,
    reshard_after_forward: bool = True,
    scan_layers: bool = True,
    dc_role: DcRole = "data",
    head: str = "auto",
    overlap_param_gather: bool = False,
    **choices: Any,
) -> StepPlan:
    """The plan of a layout on `mesh`; `choices` are other fields of `StepPlan`."""
    sizes = dict(mesh.shape)
    ranks = math.prod(sizes[axis] for axis in ("dc", "data", "expert"))
    layout = Layout.model_construct(
        mesh=MeshSettings.model_construct(**sizes),
        parallelism=ParallelismSettings(
            sequence=sequence_parallel, chunks=chunks, context_method=context_method
        ),
        dc=DcSettings(role=dc_role),
        pipeline=PipelineSettings(head=head),
        zero=ZeroSettings.model_construct(
            stage=zero_stage,
            across_sites=shard_across_sites,
            reshard_after_forward=reshard_after_forward,
        ),
        batch=BatchSettings(
            global_batch_size=ranks * microbatches, sequence_length=16, microbatches=microbatches
        ),
        communication=CommunicationSettings(overlap_param_gather=overlap_param_gather),
        remat=remat,
        scan_layers=scan_layers,
    )
    return StepPlan(mesh, policy, layout, **choices)
