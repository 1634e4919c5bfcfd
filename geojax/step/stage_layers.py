"""The assignment of a model's layers, and so of each leaf of the state, to pipeline stages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from geojax.config.layout import Layout
from geojax.models import AnyModel
from geojax.models.declaration import Declaration
from geojax.models.parameters import declarations, parameter_shapes
from geojax.models.transformer import read_by_head
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.schedule import Placement
from geojax.precision.policy import Policy
from geojax.runtime.platform import GPU, Platform
from geojax.sharding import StageAssignment
from geojax.sharding.stage_assignment import PADDING_LAYER


@dataclasses.dataclass(frozen=True)
class StagedLayers:
    """The model's layers, cut into the chunks of a pipeline."""

    placement: Placement
    """The stage of each chunk."""

    layers_per_chunk: tuple[int, ...]
    """The number of layers of each chunk, in the model's order."""

    head_shares: int = 1
    """Stages of the last one's site that share the head, its positions or its vocabulary; 1: the
    last stage has it alone."""

    shares_vocabulary: bool = False
    """True if all stages hold parts of the tables of tokens and of the head's kernel."""

    @classmethod
    def of(
        cls, layout: Layout, placement: Placement, layers_per_chunk: tuple[int, ...]
    ) -> "StagedLayers":
        """Return chunks on their stages, which share what the layout says."""
        shares, vocabulary = layout.head_shares, layout.shares_vocabulary
        return cls(placement, layers_per_chunk, shares, vocabulary)

    def __post_init__(self) -> None:
        assert len(self.layers_per_chunk) == self.placement.chunks, (
            "every chunk must have a number of layers"
        )
        assert min(self.layers_per_chunk) >= 1, "every chunk must have a layer"

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        return sum(self.layers_per_chunk)

    @property
    def max_layers_per_chunk(self) -> int:
        """The layers of the longest chunk; shorter ones are padded to as many."""
        return max(self.layers_per_chunk)

    @property
    def layers_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """The layers that each stage holds, chunk after chunk; -1 for a padding layer."""
        firsts = [sum(self.layers_per_chunk[:chunk]) for chunk in range(self.placement.chunks)]
        count = self.placement.chunks_per_stage * self.max_layers_per_chunk

        def of_chunk(chunk: int) -> list[int]:
            length = self.layers_per_chunk[chunk]
            layers = range(firsts[chunk], firsts[chunk] + length)
            return [*layers, *[PADDING_LAYER] * (self.max_layers_per_chunk - length)]

        def of_stage(stage: int) -> tuple[int, ...]:
            chunks = self.placement.chunks_of(stage)
            layers_held = [layer for chunk in chunks for layer in of_chunk(chunk)]
            return (*layers_held, *[PADDING_LAYER] * (count - len(layers_held)))

        return tuple(of_stage(stage) for stage in range(self.placement.stages))

    @property
    def first_stage(self) -> int:
        """The stage that embeds the tokens."""
        return self.placement.stage_of[0]

    @property
    def last_stage(self) -> int:
        """The stage that has the model's last layer."""
        return self.placement.stage_of[-1]

    @property
    def head_stages(self) -> range:
        """The stages that compute the loss."""
        first = self.last_stage // self.head_shares * self.head_shares
        return range(first, first + self.head_shares)


def placement_of(layout: Layout) -> Placement:
    """Return the stage of each chunk of a layout's pipeline."""
    settings, sites = layout.pipeline, [layout.mesh.stage] * layout.pipeline_sites
    return schedule_entry(settings.schedule).placement(sites, settings.virtual_stages)


def staged_layers(layout: Layout) -> StagedLayers | None:
    """Return the layers and the stage of each chunk; None for a layout without a pipeline."""
    if layout.pipeline_stages == 1:
        return None
    assert layout.pipeline.layers is not None, "the layers of a resolved layout are known"
    return StagedLayers.of(layout, placement_of(layout), layout.pipeline.layers)


def stage_assignments(model: AnyModel, staged: StagedLayers, axes: Sequence[str]) -> Any:
    """Return the `StageAssignment` of each leaf of `parameter_shapes(model)`.

    The first stage holds the tables; those that compute the loss hold the final norm, the head and
    the modules for later tokens, and each table that these read. A leaf whose vocabulary the stages
    share has none: they shard it.

    Args:
        model: the model.
        staged: how the stages share its layers.
        axes: the mesh axes that number the stages.
    """
    assert staged.layers == model.num_stacked_layers, (
        f"{staged.layers} layers on stages, not {model.num_stacked_layers}"
    )
    stages = staged.placement.stages
    layers = StageAssignment(tuple(axes), staged.layers_of_stage)

    shapes = parameter_shapes(model)
    of_head = read_by_head(shapes, model)
    read_twice = {path for path, _ in jax.tree_util.tree_leaves_with_path(of_head)}

    def assignment(
        path: tuple[Any, ...], _: Any, declaration: Declaration
    ) -> StageAssignment | None:
        if path[0].key == "layers":
            return layers
        if staged.shares_vocabulary and "vocabulary" in declaration.axes:
            return None
        is_table = path[0].key == "embedding"
        holders = {staged.first_stage} if is_table else set(staged.head_stages)
        if path in read_twice:
            holders.update(staged.head_stages)
        return StageAssignment.on(tuple(axes), stages, holders)

    return jax.tree_util.tree_map_with_path(assignment, shapes, declarations(model))


def gathers_beside_ticks(layout: Layout, platform: Platform) -> bool:
    """Return True if a stage's weights are gathered chunk by chunk, beside the first ticks.

    Args:
        layout: of a run.
        platform: of its devices.
    """
    given = layout.communication.overlap_param_gather
    if layout.pipeline_stages == 1 or layout.dc.join == "islands":
        return False
    if given != "auto":
        return given
    sharded = layout.zero.stage > 0 and layout.mesh.data * layout.mesh.expert > 1
    return platform is GPU and sharded and placement_of(layout).chunks_per_stage > 1


def holds_chunks(layout: Layout, most_layers: int, platform: Platform) -> bool:
    """Return True if a stage runs copies of its chunks; arguments are those of `has_joint_ticks`.

    The program itself decides by its ticks (`TickProgram.holds_chunks`).
    """
    return layout.pipeline.virtual_stages > 1 and has_joint_ticks(layout, most_layers, platform)


def adds_in_products(model: AnyModel, policy: Policy, stages: int) -> bool:
    """Return True if products add to the sums of the chunk that a stage runs a copy of.

    In FP8 they are calls in branches, and of experts no plain products: sums are passes of their
    own then, and a copy of them would only cost time. So it would with two stages: a stage turns to
    another chunk after as many microbatches as there are stages, and that moves 16 bytes a weight,
    where products that add save 6.
    """
    return policy.recipe is None and not model.is_moe and stages > 2


def has_joint_ticks(layout: Layout, most_layers: int, platform: Platform) -> bool:
    """Return True if a stage's forward and backward of one tick are one branch of the program.

    The messages of ranks of `tensor` then travel beside the other pass. Of chunks of several layers
    each pass has its layers in a loop, beside which nothing runs.

    Args:
        layout: of a run whose stages are in one program.
        most_layers: of a chunk.
        platform: of the devices.
    """
    if layout.pipeline_stages == 1 or layout.dc.join == "islands":
        return False
    entry = schedule_entry(layout.pipeline.schedule)
    has_branches = not (entry.branch_free or entry.split_backward)
    return platform is GPU and layout.mesh.tensor > 1 and most_layers == 1 and has_branches
