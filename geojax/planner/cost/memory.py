"""Memory of a layout in closed form: microseconds a call, so that a search can refuse what is full.

The arithmetic is that of `geojax plan` (`geojax.planner.memory_phases`); in place of traces it has
formulas for what a layer, the head and the embedding need. On 46 drawn layouts the dense models
miss the traces by 1% in the median and 6% at worst, those with experts by 3% and 21%: there
`DISPATCH_BUFFERS` guesses. A replica with a runtime of its own holds one microbatch,
unless `memory_limit` says how many: a run takes as many as there is room for (`held_at_once`).
"""

import dataclasses
import functools
import math
from typing import Any

import jax

from geojax.collectives import wire_format
from geojax.models import AnyModel, ModelConfig, OwnModel, partitions
from geojax.models.attention.workspace import workspace_bytes
from geojax.models.embedding import POSITIONS, dense_layers_of
from geojax.models.head import chunk_plan
from geojax.models.parameters import (
    declarations,
    parameter_count,
    parameter_kinds,
    parameter_shapes,
)
from geojax.optim import OptimizerSettings, make_optimizer
from geojax.pipeline.simulation.model_costs import layers_by_operations
from geojax.planner.buckets import MEMORY_SHARE
from geojax.planner.cost.adapters import refuse_adapters
from geojax.planner.cost.layer_bytes import (
    inner_bytes,
    itemsize,
    kept_bytes,
    layer_bytes,
    tokens_of_microbatch,
)
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.memory_phases import (
    GradientBytes,
    StepMemory,
    StepPieces,
    phases_of_site,
    phases_of_stage,
    phases_of_step,
)
from geojax.precision import policy
from geojax.runtime.platform import GPU
from geojax.step.stage_layers import adds_in_products, holds_chunks

DISPATCH_BUFFERS = 10
"""Arrays [tokens, k, H] that a layer of experts has at once in its backward pass, fitted to traced
layers of the catalog's models."""

EMBEDDING_COPIES = 3
"""Its gradient, in sizes of the table: two in float32, while it is added up, and one returned."""

CUT_TICKS = 2
"""Ticks of a hop between sites, as `pipeline.hop_ticks: auto` chooses where a link is slow."""


def layout_memory(
    model: AnyModel,
    layout: LayoutCandidate,
    *,
    device_bytes: float = math.inf,
    optimizer: OptimizerSettings | None = None,
) -> StepMemory:
    """Estimate what a step of `layout` holds on its fullest device.

    Args:
        model: the model.
        layout: its layout.
        device_bytes: memory of an accelerator, which limits buckets of layers.
        optimizer: the optimizer; None: AdamW, with two moments of each parameter.
    """
    refuse_adapters(model)
    held = held_parameters(model, layout)
    pieces, gradients = _pieces(model, layout, held), _gradients(layout, held)
    state = _state_bytes(model, layout, gradients, optimizer or OptimizerSettings())
    pipeline = layout.pipeline_stages > 1
    if layout.dc.join == "islands":
        passes = float(min(layout.pipeline.memory_limit or 1, layout.batch.microbatches))
        if pipeline:
            passes = pairs_in_flight(layout) / layout.pipeline.virtual_stages
        activations = round(held.layers * passes * pieces.held.in_backward)
        of_site = _held_by_site(layout, held, pieces, gradients)
        phases = phases_of_site(of_site, activations, pieces, has_embedding=True, has_head=True)
    elif pipeline:
        pairs = pairs_in_flight(layout) / layout.pipeline.virtual_stages
        # Gradients of weights are put off only in the memory that the forwards need, and one
        # chunk's backward (`geojax.pipeline.earlier_weights`).
        more = pieces.held.in_backward - pieces.held.before_backward
        of_layer = pairs * pieces.held.before_backward + more / layout.pipeline.virtual_stages
        virtual = layout.pipeline.virtual_stages
        phases = phases_of_stage(
            held.layers,
            round(held.layers * of_layer),
            pieces,
            gradients,
            holds_chunks=holds_chunks(layout, held.layers // virtual, GPU),
            adds_in_products=adds_in_products(
                model, policy(layout.precision), layout.pipeline_stages
            ),
        )
    else:
        count = bucket_layers(model, layout, held.layer, device_bytes)
        overlaps = layout.communication.overlap_grad_reduce is True or (
            _reduces_early(layout) and count < model.num_stacked_layers
        )
        settled = layout.changed(
            communication={"overlap_grad_reduce": overlaps, "bucket_layers": count}
        )
        phases = phases_of_step(settled, held.layers, pieces, gradients)
    return StepMemory.of(state, phases)


def _state_bytes(
    model: AnyModel,
    layout: LayoutCandidate,
    gradients: GradientBytes,
    optimizer: OptimizerSettings,
) -> dict[str, int]:
    """Return the bytes of the training state, by use."""
    dtypes = policy(layout.precision)
    shards = gradients.shards / dtypes.reduce_dtype.itemsize
    master = dtypes.master_dtype.itemsize * shards
    sites = layout.mesh.dc if layout.zero.across_sites else 1
    moments = optimizer_bytes(model, optimizer, dtypes.master_dtype)
    return {
        "master weights": round(master),
        "optimizer moments": round(moments * shards),
        "error feedback": round(master / sites) if _has_error_feedback(layout) else 0,
    }


def _gradients(layout: LayoutCandidate, held: "HeldParameters") -> GradientBytes:
    """Return the bytes of the gradients, whole and over the ranks that ZeRO names."""
    itemsize = policy(layout.precision).reduce_dtype.itemsize
    zero = layout.zero.stage
    ranks = layout.mesh.data * layout.mesh.expert if zero else 1
    sites = layout.mesh.dc if layout.zero.across_sites else 1
    layers = held.layers * held.layer
    experts = held.expert_layers / (layout.mesh.data if zero else 1)
    layer_shards = ((layers - held.expert_layers) / ranks + experts) / sites
    others = held.tables + held.head
    tied = held.tied_table if layout.pipeline_stages > 1 else 0
    return GradientBytes(
        layers=round(itemsize * layers),
        others=round(itemsize * (others + tied)),
        layer_shards=round(itemsize * layer_shards),
        other_shards=round(itemsize * others / (ranks * sites)),
        largest=round(itemsize * max(held.tables, held.head, held.layers * held.layer / 3)),
        has_errors=_has_error_feedback(layout),
        early=round(itemsize * _early_parameters(layout, held)),
    )


def _early_parameters(layout: LayoutCandidate, held: "HeldParameters") -> float:
    """Count the largest part of a pipeline's gradients that leaves early: of chunks, or the head.

    A stage with one chunk sends the head early alone.
    """
    one_program = layout.dc.join == "one_program" and layout.pipeline_stages > 1
    if not (one_program and _reduces_early(layout)):
        return 0.0
    virtual, together = layout.pipeline.virtual_stages, layout.communication.bucket_layers
    of_chunk = held.layers // virtual
    chunks = 1 if together == "auto" else max(1, together // of_chunk)
    return max(chunks * of_chunk * held.layer if chunks < virtual else 0.0, held.head)


def _pieces(model: AnyModel, layout: LayoutCandidate, held: "HeldParameters") -> StepPieces:
    """Return what a layer, the head and the embedding need, in closed form."""
    compute = itemsize(layout)
    head = compute * (held.head + held.tied_table)
    gradient = compute * held.layer
    backward = gradient + _backward_bytes(model, layout)
    logits = _head_bytes(model, layout, head)
    if model.num_nextn_predict_layers:  # a module's layer is computed again, beside the head
        again = layout.changed(remat="full")
        logits += _backward_bytes(model, again)
    stream = tokens_of_microbatch(layout) * model.hidden_size * compute
    table = compute * held.tables
    return StepPieces(
        non_layer_weights=round(compute * (held.tables + held.head)),
        layer_weights=round(gradient),
        expert_weights=round(compute * held.expert_layers / held.layers),
        held=layer_bytes(model, layout),
        stream=round(stream),
        layer_backward=round(backward),
        layer_gradient=round(gradient),
        attention=_attention_bytes(model, layout),
        head=round(logits),
        head_gradient=round(head),
        embedding_held=0,
        embedding_backward=round(EMBEDDING_COPIES * table + stream),
    )


def _held_by_site(
    layout: LayoutCandidate,
    held: "HeldParameters",
    pieces: StepPieces,
    gradients: GradientBytes,
) -> dict[str, int]:
    """Return what a site with its own runtime holds all the time beside its state, by use."""
    compute, reduce = (
        itemsize(layout),
        policy(layout.precision).reduce_dtype.itemsize,
    )
    weights = pieces.non_layer_weights + held.layers * pieces.layer_weights
    of_itself = gradients.whole
    if layout.zero.stage >= 2:
        of_itself = gradients.shards
    if layout.zero.stage == 3 and layout.zero.reshard_after_forward:
        # The shards that passes gather, in the compute dtype, and the weights of two layers.
        shards = gradients.layer_shards * compute // reduce
        weights = pieces.non_layer_weights + shards + 2 * pieces.layer_weights
    messages = _messages_bytes(layout, reduce) * gradients.shards / reduce
    return {
        "gathered weights": weights,
        "gradients": of_itself + gradients.shards,
        "communication": round(messages),
    }


def _messages_bytes(layout: LayoutCandidate, itemsize: int) -> float:
    """Return the bytes a number of a site's sums, of two steps and from each other site."""
    if layout.dc.role == "stage":
        return 0.0
    wire = wire_format(layout.communication.gradient_compression)
    sent = itemsize if wire is None else wire.message_bytes(2**20) / 2**20
    return (layout.mesh.dc + 1) * sent


def held_at_once(
    model: AnyModel,
    layout: LayoutCandidate,
    usable_bytes: float,
    *,
    optimizer: OptimizerSettings | None = None,
) -> int:
    """Return the microbatches that a site with a runtime of its own holds at once, in role data.

    Args:
        model: the model.
        layout: its layout.
        usable_bytes: memory of an accelerator that a step may fill; infinite where it is not known.
        optimizer: the optimizer; None: AdamW.
    """
    most = min(layout.pipeline.memory_limit or layout.batch.microbatches, layout.batch.microbatches)
    one = layout_memory(
        model,
        layout.changed(pipeline={"memory_limit": 1}),
        optimizer=optimizer,
    )
    more = (usable_bytes - one.bytes) / one.by_use["activations"]
    return most if more >= most - 1 else 1 + max(0, math.floor(more))


def bucket_layers(
    model: AnyModel, layout: LayoutCandidate, layer_parameters: float, device_bytes: float
) -> int:
    """Return the layers of a bucket: those given, or as many as a tenth of the memory holds twice.

    Args:
        model: the model.
        layout: its layout.
        layer_parameters: parameters of a layer that a rank of `tensor` holds.
        device_bytes: memory of an accelerator.
    """
    if layout.communication.bucket_layers != "auto":
        return layout.communication.bucket_layers
    twice = 2 * policy(layout.precision).reduce_dtype.itemsize * layer_parameters
    layers = model.num_stacked_layers
    room = MEMORY_SHARE * device_bytes
    fitting = [n for n in range(1, layers + 1) if layers % n == 0 and (n == 1 or n * twice <= room)]
    return fitting[-1]


def pairs_in_flight(layout: LayoutCandidate) -> int:
    """Count the (microbatch, chunk) pairs that the first stage holds at most, in lock-step.

    A forward and a backward share a tick, so a microbatch needs two ticks for each later chunk
    until it comes back to the first stage. Schedules with split backwards or with a memory limit
    have ticks of one action and half of this way.
    """
    stages, virtual, microbatches = (
        layout.pipeline_stages,
        layout.pipeline.virtual_stages,
        layout.batch.microbatches,
    )
    cuts = layout.mesh.dc - 1 if layout.dc.role == "stage" else 0
    there_and_back = 2 * stages - 1
    match layout.pipeline.schedule:
        case "gpipe":
            pairs = microbatches * virtual
        case "branch_free" | "geopipe":
            pairs = there_and_back + 2 * cuts * (CUT_TICKS - 1)
        case "interleaved":
            ring = stages // (cuts + 1)
            group = next(
                (n for n in range(ring, microbatches + 1) if microbatches % n == 0), microbatches
            )
            # Through all chunks of each later site and back before a stage's first backward.
            later_sites = 2 * cuts * (ring * virtual + CUT_TICKS - 1)
            pairs = (virtual - 1) * group + 2 * ring - 1 + later_sites
        case "zero_bubble_h1":
            pairs = stages
        case "latency_hiding" | "latency_hiding_split":  # as many as they may
            pairs = microbatches * virtual
        case "zbv":
            pairs = 2 * stages
        case _:
            pairs = there_and_back
    limit = microbatches if layout.pipeline.memory_limit is None else layout.pipeline.memory_limit
    return min(pairs, limit * virtual, microbatches * virtual)


@dataclasses.dataclass(frozen=True)
class HeldParameters:
    """Parameters that one rank of `tensor` and `expert` computes with, on the fullest stage."""

    layers: int
    """Layers, padding ones included."""
    layer: float
    """Parameters of one layer."""
    expert_layers: float
    """Parameters of all experts, those of modules for later tokens included."""
    tables: float
    """Parameters of the embedding and of first dense layers, which every stage holds."""
    head: float
    """Parameters of the head, 0 where it is the embedding's, and of modules for later tokens."""
    tied_table: float
    """Parameters of the embedding's table where it is the head's too; its gradients add up last."""

    @property
    def all(self) -> float:
        """All parameters together."""
        return self.layers * self.layer + self.tables + self.head


def held_parameters(model: AnyModel, layout: LayoutCandidate) -> HeldParameters:
    """Count the parameters that a rank computes with."""
    if isinstance(model, OwnModel):
        return _held_of_own(model, layout)
    sizes = _sizes(model)
    tensor = layout.mesh.tensor
    shared_kv = max(1, min(tensor, model.num_key_value_heads))
    experts = sizes.experts / (layout.mesh.expert * tensor)
    layer = sizes.replicated + sizes.sharded / tensor + sizes.key_value / shared_kv + experts
    ranks = layout.model_parallelism.vocabulary_ranks
    table = math.ceil(model.vocab_size / ranks) * model.hidden_size
    layers = _layers_of_stage(model, layout)
    modules = model.num_nextn_predict_layers
    later = modules * (layer + 2 * model.hidden_size**2)
    return HeldParameters(
        layers,
        layer,
        (layers + modules) * experts,
        table + sizes.positions + sizes.dense_replicated + sizes.dense_sharded / tensor,
        (0 if model.tie_word_embeddings else table) + later,
        table if model.tie_word_embeddings else 0,
    )


def _layers_of_stage(model: AnyModel, layout: LayoutCandidate) -> int:
    """Count the layers of the fullest stage, padding ones included."""
    if layout.pipeline_stages == 1:
        return model.num_stacked_layers
    chunks = layout.pipeline_stages * layout.pipeline.virtual_stages
    length = layout.batch.sequence_length
    given = layout.pipeline.layers or _balanced(model, length, chunks, layout.remat)
    return layout.pipeline.virtual_stages * max(given)


def _held_of_own(model: OwnModel, layout: LayoutCandidate) -> HeldParameters:
    tree, parallelism = declarations(model), layout.model_parallelism
    places = jax.tree.leaves(partitions(model, parallelism))
    count, of_experts = dict.fromkeys(tree, 0.0), 0.0
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), place in zip(leaves, places, strict=True):
        own = math.prod(leaf.shape) / math.prod(getattr(parallelism, axis) for axis in place.axes)
        count[path[0].key] += own
        of_experts += own if "expert" in leaf.axes else 0.0
    layer, experts = (each / model.num_stacked_layers for each in (count["layers"], of_experts))
    tied = count["embedding"] if model.head_reads_tokens else 0
    layers = _layers_of_stage(model, layout)
    return HeldParameters(layers, layer, layers * experts, count["embedding"], count["head"], tied)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Parameters of one layer by how they are sharded, and of the first dense layers together; and
    those of the table of positions."""

    sharded: int
    key_value: int
    experts: int
    replicated: int
    dense_sharded: int
    dense_replicated: int
    positions: int


@functools.lru_cache(maxsize=16)
def _sizes(model: ModelConfig) -> _Sizes:
    tree = declarations(model)
    of_layer = {"sharded": 0, "key_value": 0, "experts": 0, "replicated": 0}
    for leaf in jax.tree.leaves(tree["layers"]):
        if "expert" in leaf.axes:
            kind = "experts"
        elif not leaf.fp8:
            kind = "replicated"
        else:
            kind = "sharded" if leaf.heads is None else "key_value"
        of_layer[kind] += math.prod(leaf.shape[1:])
    dense = {"dense_sharded": 0, "dense_replicated": 0}
    for leaf in jax.tree.leaves(dense_layers_of(tree["embedding"])):
        dense["dense_sharded" if leaf.fp8 else "dense_replicated"] += math.prod(leaf.shape)
    positions = jax.tree.leaves(tree["embedding"].get(POSITIONS, {}))
    count = sum(math.prod(leaf.shape) for leaf in positions)
    return _Sizes(**of_layer, **dense, positions=count)


_balanced = functools.lru_cache(maxsize=1024)(layers_by_operations)


@functools.lru_cache(maxsize=64)
def optimizer_bytes(model: AnyModel, optimizer: OptimizerSettings, dtype: Any) -> float:
    """Return the bytes of the optimizer's state for each parameter, in the mean over the model."""
    parameters = parameter_shapes(model, dtype)
    chain = make_optimizer(optimizer, 1, parameter_kinds(model))
    state = jax.eval_shape(chain.init, parameters)
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return held / parameter_count(model)


def _reduces_early(layout: LayoutCandidate) -> bool:
    crosses = layout.mesh.dc > 1 and layout.dc.role == "data"
    return crosses and layout.communication.overlap_grad_reduce is not False


def _has_error_feedback(layout: LayoutCandidate) -> bool:
    return layout.communication.gradient_compression == "int8" and layout.mesh.dc > 1


def _head_bytes(model: AnyModel, layout: LayoutCandidate, gradient_bytes: float) -> float:
    """Return the most bytes of the head at once: the kernel's gradient and a chunk's logits.

    The gradient is made in float32, added up over chunks, and returned in the compute dtype.
    """
    shares = 1 if layout.shares_vocabulary else layout.head_shares
    tokens = math.ceil(tokens_of_microbatch(layout) / shares)
    columns = math.ceil(model.vocab_size / layout.model_parallelism.vocabulary_ranks)
    if isinstance(model, OwnModel):  # whose head is whole on each rank
        columns, shared = model.vocab_size, layout.parallelism.sequence
        tokens = math.ceil(tokens / layout.mesh.tensor) if shared else tokens
    count, size = chunk_plan(tokens, columns, 4)
    stream = tokens * model.hidden_size * itemsize(layout)
    logits = size * columns * (4 + itemsize(layout))
    beside = 2 * gradient_bytes + logits if count > 1 else logits
    return max(3 * gradient_bytes, beside) + 2 * stream


def _attention_bytes(model: AnyModel, layout: LayoutCandidate) -> int:
    """Return the workspace of attention's kernel, as on GPUs."""
    if isinstance(model, OwnModel):
        return 0
    tensor = layout.mesh.tensor
    shape = layout.microbatch_size, layout.batch.sequence_length // layout.mesh.context
    return workspace_bytes(
        policy(layout.precision).compute_dtype,
        (*shape, model.num_attention_heads // tensor, model.head_dim),
        (*shape, max(model.num_key_value_heads // tensor, 1), model.v_head_dim),
        softcap=model.attn_logit_softcapping is not None,
        platform="gpu",
    )


def _backward_bytes(model: AnyModel, layout: LayoutCandidate) -> float:
    """Return the temporary bytes of one layer's backward pass."""
    tokens = tokens_of_microbatch(layout)
    if isinstance(model, OwnModel):
        return kept_bytes(model, layout.changed(remat="none"))
    if model.is_moe:
        dispatched = model.num_experts_per_tok * tokens * model.hidden_size * itemsize(layout)
        return DISPATCH_BUFFERS * dispatched
    inner = inner_bytes(model, layout)
    if layout.remat != "full":
        return inner
    none = layout.changed(remat="none")
    return inner + kept_bytes(model, none)
