"""A training pass: one microbatch through the model and back.

    embed ─► forward over the layers ─► head and loss
                     │ residuals             │ forward and backward at once
    embed ◄─ backward over the layers ◄──────┘

The backward is written out, not left to `jax.grad` of a loop, so that a layer's gradient can go
where it belongs as soon as it is there.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives import after
from geojax.models import Batch, ModelConfig, Parameters
from geojax.models.chunk.layer_scan import (
    GradientSink,
    Span,
    StackedWeights,
    WeightSource,
    backward_layers,
    forward_layers,
)
from geojax.models.chunk.remat import rematerialize
from geojax.models.layers import layer, make_context
from geojax.models.moe import weighted_aux_loss
from geojax.models.transformer import embed, head_loss
from geojax.precision import LinearMatmul, scale_gradient
from geojax.step.plan import StepPlan


class Gradients(NamedTuple):
    """What a training pass gives."""

    loss: jax.Array
    """The sum of the tokens' losses."""
    balance: jax.Array | None
    """What a mixture's balance adds to it; None for a dense model."""
    targets: jax.Array
    """The number of them that count."""
    outer: Parameters
    """The gradient of all that is not in a layer, in the reduction dtype."""
    layers: Any
    """The sink's sums."""
    ahead: list[Any]
    """What each source carries to its first layer, if it gathers for each pass; [] of a pipeline.
    """


@dataclasses.dataclass(frozen=True)
class TrainingPass:
    """The pass of one model under one plan; what it reads but is not differentiated."""

    model: ModelConfig
    plan: StepPlan
    dropout_key: jax.Array | None
    gradient_factor: jax.Array | None = None
    """What all gradients are multiplied by on their way (fp16); None: nothing."""

    def scaled(self, loss: jax.Array) -> jax.Array:
        """A loss as it is, from which gradients start multiplied by the factor."""
        return loss if self.gradient_factor is None else scale_gradient(loss, self.gradient_factor)

    @property
    def loss_dtype(self) -> Any:
        """Of the sum of losses."""
        return jnp.promote_types(self.plan.policy.compute_dtype, jnp.float32)

    def gradients(
        self,
        outer: Parameters,
        sources: Sequence[WeightSource],
        ahead: list[Any],
        sink: GradientSink,
        sums: Any,
        batch: Batch,
        *,
        behind: jax.Array | None = None,
        together: int = 1,
    ) -> Gradients:
        """Loss and gradients of a microbatch.

        Args:
            outer: this rank's weights, but for the layers.
            sources: of the layers' weights, one for each of the spans of `StepPlan.matmul`.
            ahead: what each source carries to its first layer; None: nothing.
            sink: of the layers' gradients.
            sums: the sink's, so far.
            batch: this rank's part of the microbatch.
            behind: a result of the pass that has to be over when this one begins: of two at once,
                both would hold their residuals.
            together: layers whose gradients the sink takes together.
        """
        model, plan = self.model, self.plan
        if behind is not None:
            batch, behind = lax.optimization_barrier((batch, behind))
            batch = after(batch, behind)
        x, embed_backward = jax.vjp(
            lambda tables: embed(tables, batch, model, self.dropout_key, plan.parallelism),
            outer["embedding"],
        )
        context = make_context(batch, model, x.dtype, self.dropout_key, plan.parallelism)
        keep = plan.zero_stage == 3 and not plan.reshard_after_forward
        spans = self.spans(sources)
        forward = forward_layers(
            [
                dataclasses.replace(span, layer=rematerialize(span.layer, plan.remat))
                for span in spans
            ],
            ahead,
            x,
            context,
            keep_weights=keep,
        )
        read = {name: outer[name] for name in self.read_by_head}
        total, head_backward, (loss, balance) = jax.vjp(
            functools.partial(self._losses, batch=batch),
            read,
            forward.x,
            forward.balance,
            has_aux=True,
        )
        own, *cotangents = head_backward(jnp.ones_like(total))
        kept = [weights is not None for weights in forward.weights]
        backward = backward_layers(
            [
                source if weights is None else StackedWeights(weights)
                for source, weights in zip(sources, forward.weights, strict=True)
            ],
            [None if known else own for own, known in zip(forward.ahead, kept, strict=True)],
            sink,
            sums,
            forward.residuals,
            tuple(cotangents),
            context,
            [span.count for span in spans],
            together=together,
        )
        (tables,) = embed_backward(backward.x)
        targets = batch["loss_mask"].astype(loss.dtype).sum()
        own, loss, balance, targets = after((own, loss, balance, targets), backward.x)
        return Gradients(
            loss,
            balance,
            targets,
            self.outer_gradients(own, tables),
            backward.sums,
            [
                before if known else behind
                for before, behind, known in zip(forward.ahead, backward.ahead, kept, strict=True)
            ],
        )

    def loss(
        self,
        outer: Parameters,
        sources: Sequence[WeightSource],
        ahead: list[Any],
        batch: Batch,
    ) -> tuple[jax.Array, jax.Array]:
        """The sum of the tokens' losses and the number of them that count, forwards only."""
        model, plan = self.model, self.plan
        x = embed(outer["embedding"], batch, model, self.dropout_key, plan.parallelism)
        context = make_context(batch, model, x.dtype, self.dropout_key, plan.parallelism)
        x = forward_layers(self.spans(sources), ahead, x, context).x
        loss = head_loss(outer, x, batch, model, plan.parallelism)
        return loss, batch["loss_mask"].astype(loss.dtype).sum()

    @jax.named_scope("head")
    def _losses(
        self, read: Parameters, x: jax.Array, balance: jax.Array | None, *, batch: Batch
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        """What is differentiated; and its parts, the tokens' losses and the experts' balance."""
        loss = head_loss(read, x, batch, self.model, self.plan.parallelism)
        if balance is None or not self.model.is_moe:
            return self.scaled(loss), (loss, None)
        weighted = weighted_aux_loss(balance, batch["loss_mask"], self.model)
        return self.scaled(loss + weighted), (loss, weighted)

    def spans(self, sources: Sequence[WeightSource]) -> list[Span]:
        """All layers, without rematerialisation; those that multiply alike are together."""
        spans = self.plan.matmul.spans(self.model.num_hidden_layers)
        return [
            Span(count, functools.partial(self._layer, matmul), source)
            for (count, matmul), source in zip(spans, sources, strict=True)
        ]

    def layer(
        self, weights: Parameters, x: jax.Array, index: jax.Array, context: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """Any one layer, without rematerialisation."""
        matmul = self.plan.matmul.at_layer(index, self.model.num_hidden_layers)
        return self._layer(matmul, weights, x, index, context)

    def _layer(
        self,
        matmul: LinearMatmul,
        weights: Parameters,
        x: jax.Array,
        index: jax.Array,
        context: Any,
    ) -> tuple[jax.Array, jax.Array | None]:
        model, plan = self.model, self.plan
        return layer(weights, x, index, context, model, plan.attention, plan.parallelism, matmul)

    @property
    def read_by_head(self) -> tuple[str, ...]:
        """The parts of the parameters that the head reads."""
        return ("final_norm", "embedding" if self.model.tie_word_embeddings else "head")

    def outer_gradients(self, of_head: Parameters, tables: Parameters) -> Parameters:
        """The gradients of the head and of the tables; a tied table gets both."""
        cast = functools.partial(jax.tree.map, lambda x: x.astype(self.plan.policy.reduce_dtype))
        of_head, tables = cast(of_head), cast(tables)
        if "embedding" in of_head:
            tables = jax.tree.map(jnp.add, tables, of_head["embedding"])
        return of_head | {"embedding": tables}
