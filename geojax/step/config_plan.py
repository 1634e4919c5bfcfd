"""The plan of a run's step on its mesh: what its config and its resolved layout say."""

import jax.numpy as jnp
from jax.sharding import Mesh

from geojax.collectives import FLOAT32, WireFormat, wire_format
from geojax.config.fp8_settings import policy_of
from geojax.config.layout import Layout
from geojax.config.layout_sections import MeshSettings, ZeroSettings
from geojax.config.pipeline_settings import DcSettings, PipelineSettings
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.schedule import TickTable
from geojax.precision import BackendChoice, chosen_backend
from geojax.runtime.platform import Platform, platform_of, sums_in_messages
from geojax.step.plan import StepPlan
from geojax.step.resolved import Step
from geojax.step.stage_layers import StagedLayers, has_joint_ticks, staged_layers

DEFAULT_BUCKET_BYTES = 16 * 2**20
"""Most bytes of a bucket where no link says what suits it."""


def make_run_mesh(config: RunConfig) -> Mesh:
    """Make the mesh of `config` over the devices of all processes.

    Raises:
        UserError: the layout does not fit the devices or the topology.
    """
    return make_mesh(config.load_topology(), **config.mesh.model_dump())


def step_plan(config: RunConfig, step: Step, mesh: Mesh) -> StepPlan:
    """Plan the step of `config` on the mesh of all sites.

    Args:
        config: the run.
        step: its choices.
        mesh: the devices.

    Raises:
        UserError: its pipeline or its FP8 backend cannot run there.
    """
    ticks = None if step.pipeline is None else step.pipeline.as_table
    return plan_of_layout(config, step.layout, mesh, ticks)


def plan_of_layout(
    config: RunConfig, layout: Layout, mesh: Mesh, ticks: TickTable | None = None
) -> StepPlan:
    """Plan a step of the model of `config` on a mesh.

    Args:
        config: what the layout does not say: the model, FP8 and the loss scale.
        layout: of the mesh; buckets that it leaves to "auto" are those without a topology.
        mesh: the devices, which need not exist.
        ticks: of the pipeline; None: they are not known yet, or there is none.

    Raises:
        UserError: the ticks or the FP8 backend cannot run there.
    """
    communication = layout.communication
    staged = staged_layers(layout)
    return StepPlan(
        mesh=mesh,
        policy=policy_of(layout.precision, config.fp8),
        layout=layout,
        loss_scale=config.loss_scale,
        wire_format=_wire_format(config, layout, mesh),
        bucket_bytes=(
            DEFAULT_BUCKET_BYTES
            if communication.bucket_bytes == "auto"
            else communication.bucket_bytes
        ),
        overlap_grad_reduce=communication.overlap_grad_reduce is True,
        bucket_layers=1 if communication.bucket_layers == "auto" else communication.bucket_layers,
        overlap_scatter=communication.overlap_scatter is True,
        fp8_backend=fp8_backend_of(config, mesh).name,
        grouped_matmul=config.model.is_moe,
        share_amax_across_dc=config.fp8.share_amax_across_dc,
        staged_layers=staged,
        tick_program=(
            None
            if ticks is None or staged is None
            else tick_program(config, ticks, staged, platform_of(mesh))
        ),
    )


def tick_program(
    config: RunConfig, table: TickTable, staged: StagedLayers, platform: Platform
) -> TickProgram:
    """Return a run's ticks as a program.

    Raises:
        UserError: devices of `platform` cannot run it.
    """
    branch_free = schedule_entry(config.pipeline.schedule).branch_free
    unequal = len(set(staged.layers_per_chunk)) > 1 or config.model.first_k_dense_replace > 0
    ring = config.mesh.context > 1 and config.parallelism.context_method == "ring"
    if not platform.permutes_by_group and ring and (unequal or not branch_free):
        raise UserError(
            "parallelism.context_method=ring requires on CPUs that all stages work at the same "
            "time. Set context_method to all_gather or ulysses, or schedule to branch_free with "
            "equal chunks and no first dense layers"
        )
    joint = has_joint_ticks(config, max(staged.layers_per_chunk), platform)
    return TickProgram.of(
        table,
        branch_free=branch_free,
        joint=joint,
        shares_head=staged.head_shares > 1,
        shares_embedding=staged.shares_vocabulary,
    )


def plan_without_pipeline(config: RunConfig, mesh: Mesh) -> StepPlan:
    """Plan a step of the model on a mesh of one stage, with whole weights on every data rank.

    Raises:
        UserError: its FP8 backend cannot run there.
    """
    layout = config.layout.model_copy(
        update={
            "mesh": MeshSettings(**dict(mesh.shape)),
            "dc": DcSettings(),  # sites as stages would be a pipeline too
            "pipeline": PipelineSettings(),
            "zero": ZeroSettings(stage=0),
        }
    )
    return plan_of_layout(config, layout, mesh)


def _wire_format(config: RunConfig, layout: Layout, mesh: Mesh) -> WireFormat | None:
    """Choose the format of gradients on the link.

    Where a psum cannot fill a long link, float32 travels in messages (`sums_in_messages`).
    """
    requested = wire_format(layout.communication.gradient_compression)
    float32 = policy_of(layout.precision, config.fp8).reduce_dtype == jnp.float32
    sums = layout.dc.role == "data" and not layout.zero.across_sites
    return (
        FLOAT32 if requested is None and sums_in_messages(mesh) and float32 and sums else requested
    )


def fp8_backend_of(config: RunConfig, mesh: Mesh) -> BackendChoice:
    """Choose the backend of FP8 products.

    Raises:
        UserError: the one that `fp8.backend` names cannot run on the mesh.
    """
    recipe = policy_of(config.precision, config.fp8).recipe
    if recipe is None:
        return BackendChoice("reference", "no FP8")
    return chosen_backend(recipe, platform_of(mesh).name, config.fp8.backend)
