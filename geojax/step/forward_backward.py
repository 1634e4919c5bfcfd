"""Forward and backward of one microbatch on one rank, and of a stage's chunks in a pipeline.

    embed ─► forward over the layers ─► head and loss
                     │ residuals             │ forward and backward at once
    embed ◄─ backward over the layers ◄──────┘

The backward is written out (`geojax.models.chunk`), not left to `jax.grad` of a loop, so that a
layer's gradient can go where it belongs as soon as it is there.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives import after
from geojax.models import AnyModel, Batch, Parameters
from geojax.models.chunk.chunk import Chunk, ChunkWeights
from geojax.models.chunk.layer_io import GradientSink, LayerWeights
from geojax.models.context import ComputeSettings
from geojax.models.transformer import model_chunk, read_by_head
from geojax.pipeline.execution import EarlyReduction, Executor, LateChunks, StageWeights
from geojax.pipeline.execution.ready_parts import Part
from geojax.pipeline.execution.shared_positions import SharedPositions
from geojax.pipeline.execution.shared_vocabulary import SharedVocabulary
from geojax.precision import detach_amax, scale_gradient
from geojax.runtime.platform import GPU, platform_of
from geojax.step.plan import StepPlan
from geojax.step.stage_layers import adds_in_products


class Gradients(NamedTuple):
    """Loss and gradients of microbatches on one rank; nothing is reduced yet."""

    loss: jax.Array
    """The sum of the tokens' losses."""
    mtp_loss: jax.Array | None
    """The share of modules for later tokens in the loss; None without any."""
    aux_loss: jax.Array | None
    """The share of balance losses in the loss; None without experts."""
    targets: jax.Array
    """The number of tokens that count."""
    non_layer_params: Parameters
    """The gradient of all that is not in a layer, in the reduction dtype."""
    layers: Any
    """The sink's sums."""
    prefetched: list[Any]
    """The weights that each source prefetched for its first layer."""


class StageGradients(NamedTuple):
    """Loss and gradients of a step's microbatches on one stage of a pipeline."""

    loss: jax.Array
    """The sum of the losses of the tokens whose head this stage has."""
    mtp_loss: jax.Array | None
    """The share of modules for later tokens in the loss, likewise; None without any."""
    aux_loss: jax.Array | None
    """The share of this stage's balance losses in it; None without experts."""
    targets: jax.Array
    """The number of tokens that count, on the last stage; zero elsewhere."""
    sums: StageWeights
    """The gradients; nothing is reduced."""
    exchanged: Mapping[Part, Any]
    """The parts of them that were reduced early."""


@dataclasses.dataclass(frozen=True)
class ForwardBackward:
    """Forward and backward of one model under one plan, with all that is not differentiated."""

    model: AnyModel
    plan: StepPlan
    dropout_key: jax.Array | None
    gradient_factor: jax.Array | None = None
    """The factor that all gradients come out multiplied by (fp16); None: they do not."""

    @property
    def loss_dtype(self) -> Any:
        """The dtype of the sum of losses."""
        return jnp.promote_types(self.plan.policy.compute_dtype, jnp.float32)

    def chunk(self, layers: range) -> Chunk:
        """Return the chunk of consecutive `layers`, whose gradients start from the factor."""
        plan = self.plan
        chunk = model_chunk(
            self.model,
            layers,
            plan.policy.compute_dtype,
            ComputeSettings(
                plan.parallelism,
                plan.matmul,
                plan.attention,
                positions_first=_positions_first(plan),
            ),
            dropout_key=self.dropout_key,
            remat=plan.layout.remat,
        )
        if not plan.scans_layers:
            chunk = dataclasses.replace(chunk, layers=chunk.layers.unrolled)
        factor = self.gradient_factor
        if factor is None:
            return chunk
        return dataclasses.replace(
            chunk, functions=chunk.functions.scaled(lambda loss: scale_gradient(loss, factor))
        )

    @property
    def whole_model(self) -> Chunk:
        """The chunk of all layers, with embedding and head."""
        return self.chunk(range(self.model.num_stacked_layers))

    @property
    def for_evaluation(self) -> "ForwardBackward":
        """The same model whose loss is the mean log-likelihood of next tokens alone.

        Modules for later tokens and the z-loss of the head are for training.
        """
        return dataclasses.replace(self, model=self.model.for_evaluation)

    def gradients(
        self,
        non_layer_params: Parameters,
        layers: Sequence[LayerWeights],
        batch: Batch,
        sink: GradientSink,
        sums: Any,
        *,
        after_result: jax.Array | None = None,
        bucket_layers: int = 1,
    ) -> Gradients:
        """Compute loss and gradients of a microbatch.

        Args:
            non_layer_params: this rank's weights in no layer, gathered.
            layers: the layers' weights, from `geojax.step.gather.step_weights`.
            batch: this rank's part of the microbatch.
            sink: takes the gradients of the layers.
            sums: the sink's, so far.
            after_result: a result of the microbatch before, which has to be done when this one
                begins: of two at once, both would hold their residuals.
            bucket_layers: layers whose gradients the sink takes together.
        """
        if after_result is not None:
            batch, after_result = lax.optimization_barrier((batch, after_result))
            batch = after(batch, after_result)
        plan, chunk = self.plan, self.whole_model
        context = chunk.functions.context(batch)
        forward = chunk.forward(
            self._chunk_weights(non_layer_params, layers),
            None,
            batch,
            context,
            keep_weights=plan.layout.zero.stage == 3 and not plan.layout.zero.reshard_after_forward,
        )
        # Messages of the documents' numbers need nothing of the forward.
        of_backward = after((batch, context), forward.x)
        backward = chunk.backward(
            forward.weights,
            forward.residuals,
            None,
            *of_backward,
            sink,
            sums,
            bucket_layers=bucket_layers,
        )
        assert backward.loss is not None, "the whole model must have a head"
        targets = batch["loss_mask"].astype(backward.loss.dtype).sum()
        last, loss, balance, targets = after(
            (backward.last, backward.loss, forward.balance_loss, targets), backward.x
        )
        prefetched = [
            behind if kept is None else kept
            for kept, behind in zip(forward.prefetched, backward.prefetched, strict=True)
        ]
        gradients = self.non_layer_gradients(backward.first, last)
        losses = self._by_kind(loss)
        return Gradients(*losses, balance, targets, gradients, backward.layers, prefetched)

    def loss(
        self, non_layer_params: Parameters, layers: Sequence[LayerWeights], batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the sum of the tokens' losses and the number that count, forwards only.

        Arguments are those of `gradients`.
        """
        run = self.for_evaluation
        chunk = run.whole_model
        weights = run._chunk_weights(non_layer_params, layers)
        loss, _ = chunk.forward_only(weights, None, batch, chunk.functions.context(batch))
        return loss, batch["loss_mask"].astype(loss.dtype).sum()

    def pipeline_gradients(
        self,
        weights: Parameters,
        microbatches: Batch,
        early: EarlyReduction | None = None,
        late: LateChunks | None = None,
    ) -> StageGradients:
        """Compute loss and gradients of a step's microbatches on this stage of a pipeline.

        Args:
            weights: this stage's, gathered: all of its layers, stacked, and what is in no layer.
            microbatches: this rank's sequences, [M, B, ...].
            early: reduces parts of the gradients as soon as they are whole; None: nothing does.
            late: gathers the chunks of this stage but the first; None: `weights` have all.
        """
        made = self._executor.gradients(self._stage_weights(weights), microbatches, early, late)
        targets = self._on_last_stage(microbatches["loss_mask"].astype(made.loss.dtype).sum())
        losses = self._by_kind(made.loss)
        return StageGradients(*losses, made.balance, targets, made.weights, made.exchanged)

    def stage_parameters(self, sums: StageWeights) -> Parameters:
        """Bring a stage's gradients into the structure of the parameters, without amax."""
        layers, _ = detach_amax(sums.layers)
        return self.non_layer_gradients(sums.first, sums.last) | {"layers": layers}

    def pipeline_loss(
        self, weights: Parameters, microbatches: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Sum the losses of the tokens whose head this stage has; the last one counts the targets.

        Arguments are those of `pipeline_gradients`.
        """
        run = self.for_evaluation
        loss = run._executor.loss(run._stage_weights(weights), microbatches)
        return loss, self._on_last_stage(microbatches["loss_mask"].astype(loss.dtype).sum())

    def non_layer_gradients(self, first: Parameters, last: Parameters) -> Parameters:
        """Join the gradients of the embedding and of the head; a tied table gets both."""
        cast = functools.partial(jax.tree.map, lambda x: x.astype(self.plan.policy.reduce_dtype))
        last, tables = cast(last), cast(first)
        return last | {"embedding": with_sums(tables, last.get("embedding", {}))}

    def _by_kind(self, losses: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Split the result of the head: next-token losses, and the share of later tokens."""
        return (losses[0], losses[1]) if losses.ndim else (losses, None)

    def _chunk_weights(
        self, non_layer_params: Parameters, layers: Sequence[LayerWeights]
    ) -> ChunkWeights:
        last = read_by_head(non_layer_params, self.model)
        return ChunkWeights(non_layer_params["embedding"], layers, last)

    def _stage_weights(self, weights: Parameters) -> StageWeights:
        last = read_by_head(weights, self.model)
        return StageWeights(weights["embedding"], weights["layers"], last)

    @property
    def _executor(self) -> Executor:
        plan = self.plan
        return Executor(
            plan.program,
            self.whole_model.functions,
            plan.stage_axes,
            plan.stages.layers_per_chunk,
            plan.policy.reduce_dtype,
            self.shared_ends,
            adds_in_products(self.model, plan.policy, plan.stages.placement.stages),
        )

    @property
    def shared_ends(self) -> SharedPositions | SharedVocabulary | None:
        """Parts of embedding and head that stages share; None: one stage has each."""
        plan, staged = self.plan, self.plan.staged_layers
        if staged is None or staged.head_shares == 1:
            return None
        functions = self.whole_model.functions
        first, last = staged.first_stage, staged.last_stage
        if staged.shares_vocabulary:
            return SharedVocabulary(functions, plan.stage_axes, first, last)
        return SharedPositions(functions, plan.stage_axes, staged.head_stages, last)

    def _on_last_stage(self, number: jax.Array) -> jax.Array:
        """Return the number on the stage that has the head, 0 elsewhere."""
        plan = self.plan
        is_last = lax.axis_index(plan.stage_axes) == plan.stages.last_stage
        return jnp.where(is_last, number, 0)


def _positions_first(plan: StepPlan) -> bool:
    """Return True if GPUs gather the stream for products whose rows may have any order.

    Blocks of tokens that share an FP8 scale are of one sequence.
    """
    gathers = plan.parallelism.sequence and plan.parallelism.tensor > 1
    return gathers and plan.policy.recipe is None and platform_of(plan.mesh) is GPU


def with_sums(tree: Parameters, added: Parameters) -> Parameters:
    """Return `tree` with the leaves of `added`, some of its own, added to them."""
    if not isinstance(added, dict):
        return jax.tree.map(jnp.add, tree, added)
    return tree | {name: with_sums(tree[name], own) for name, own in added.items()}
