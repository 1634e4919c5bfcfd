"""The sums of a site, those of all sites, and the update: what follows the backward of a chunk.

Everything here runs inside the site's `shard_map`, takes and gives `PerRank`s but for the state.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from geojax.islands.programs import buckets
from geojax.islands.programs.chunk_passes import ChunkPasses
from geojax.islands.programs.per_rank import pack, unpack
from geojax.islands.programs.shared import divide, whole
from geojax.islands.programs.values import ChunkScalars, ChunkSums, Reduced, StepInputs, StepScalars
from geojax.optim import global_norm
from geojax.step.amax_history import max_in_site
from geojax.step.forward_backward import with_sums
from geojax.step.grad_reduce import inter_site_all_reduce, reduce_gradients
from geojax.step.state import TrainState
from geojax.step.update import (
    SiteSums,
    apply_sums,
    gradient_factor,
    scaled,
    sum_in_site,
    sum_scalars_over_sites,
    sum_signals,
)


@dataclasses.dataclass(frozen=True)
class SumsOfSites:
    """The sums of a step of one site, and what is made of those of all sites."""

    passes: ChunkPasses
    layouts: TrainState
    """The `LeafLayout` of each leaf of the site's state."""
    optimizer: optax.GradientTransformationExtraArgs
    """The optax chain that runs on shards."""
    schedule: optax.Schedule
    """Learning rate by update, for the metrics."""

    def reduce(self, chunk: int, sums: Any, table: Any, errors: Any, inputs: StepInputs) -> Any:
        """Sum the gradients of a chunk inside the site, and encode what crosses: `Reduced`.

        Args:
            chunk: the chunk.
            sums: its `ChunkSums`.
            table: the head's gradient of a tied table, if it is in this chunk's bucket; else {}.
            errors: the state's error feedback.
            inputs: the arguments of the step.
        """
        part, plan = self.passes.part, self.passes.plan
        made: ChunkSums = unpack(sums)
        of_head = unpack(table)
        gradients = {
            **made.last,
            **made.first,
            "layers": self.passes.sink.finish(made.layers.weights),
        }
        if of_head:
            gradients["embedding"] = with_sums(made.first["embedding"], of_head)
        layouts = part.layouts_of_bucket(self.layouts.parameters, chunk)
        gradients = {name: gradients[name] for name in layouts}
        reduce = inter_site_all_reduce if plan.layout.zero.stage >= 2 else reduce_gradients
        shards = reduce(gradients, None, layouts, plan).gradients
        factor = gradient_factor(inputs.loss_scale, inputs.batch, plan)
        shards = scaled(shards, None if factor is None else 1 / factor)
        encoded = buckets.encode(shards, part.bucket(errors, chunk), plan.wire_format)
        # Every bucket of a site that holds the whole model crosses.
        messages = divide(encoded.messages) if part.holds_all else encoded.messages
        scalars = ChunkScalars(made.loss, made.aux_loss, made.layers.amax)
        return pack(Reduced(messages, encoded.error_feedback, scalars))

    def reduce_scalars(
        self, of_chunks: Any, totals: Any, inputs: StepInputs, signals: jax.Array
    ) -> Any:
        """Sum losses and counts of all chunks in the site, and take the largest amax.

        Args:
            of_chunks: the `ChunkScalars` of each chunk.
            totals: the gradients of each chunk, if the site holds a part of the model; else None.
            inputs: the arguments of the step.
            signals: this rank's requests to all ranks.

        Returns:
            The `StepScalars` that cross, and the site's amax.
        """
        part, plan = self.passes.part, self.passes.plan
        made: list[ChunkScalars] = unpack(of_chunks)
        loss = functools.reduce(jnp.add, (each.loss for each in made))
        targets = inputs.batch["loss_mask"].astype(loss.dtype).sum()
        sums = [loss, targets if part.has_head else jnp.zeros_like(targets)]
        sums += list(sum_signals(signals, loss))
        aux_loss = [each.aux_loss for each in made if each.aux_loss is not None]
        if aux_loss:
            sums.append(functools.reduce(jnp.add, aux_loss))
        amax = None
        if made[0].amax is not None:
            amax = max_in_site(part.join_layers([each.amax for each in made]), plan)
        crosses = StepScalars(
            sum_scalars_over_sites(sum_in_site(jnp.stack(sums)), plan),
            None if totals is None else self._squares(unpack(totals)),
            amax if plan.share_amax_across_dc else None,
        )
        return pack((divide(crosses), amax))

    def _squares(self, totals: Any) -> jax.Array:
        """Return the squared norm of a site's gradients; a copied table counts elsewhere."""
        gradients, layouts = self.passes.part.join(totals), self.layouts.parameters
        if self.passes.part.copies_table:
            gradients, layouts = (
                {name: tree for name, tree in each.items() if name != "embedding"}
                for each in (gradients, layouts)
            )
        return jnp.square(global_norm(gradients, layouts))

    def add(self, chunk: int, parts: Any) -> Any:
        """Sum the buckets of a chunk, in the order of sites."""
        plan = self.passes.plan
        layouts = self.passes.part.layouts_of_bucket(self.layouts.parameters, chunk)
        return pack(buckets.add(unpack(parts), layouts, plan.wire_format, plan.policy.reduce_dtype))

    def add_table(self, parts: Any) -> Any:
        """Sum the parts of a table's gradient, in the order of sites."""
        return pack(buckets.add(unpack(parts), None, None, None))

    def add_scalars(self, parts: Any) -> Any:
        """Sum the `StepScalars` of all sites, and take the largest amax."""
        own: Sequence[StepScalars] = whole(unpack(parts))
        sums, squares, amax = zip(*own, strict=True)
        total = StepScalars(
            functools.reduce(jnp.add, sums),
            None if squares[0] is None else functools.reduce(jnp.add, squares),
            None if amax[0] is None else functools.reduce(jnp.maximum, amax),
        )
        return pack(total)

    def apply(
        self, state: TrainState, totals: Any, scalars: Any, own_amax: Any, errors: Any
    ) -> Any:
        """Update the state: state and metrics.

        Args:
            state: this rank's shards.
            totals: the gradients of each chunk, summed over sites.
            scalars: the `StepScalars` of all sites.
            own_amax: the site's.
            errors: the error feedback of each chunk.
        """
        part = self.passes.part
        of_step: StepScalars = unpack(scalars)
        amax = unpack(own_amax) if of_step.amax is None else of_step.amax
        feedback = unpack(errors)
        return apply_sums(
            state,
            SiteSums(
                part.join(unpack(totals)),
                of_step.sums,
                amax,
                None if feedback[0] is None else part.join(feedback),
            ),
            layouts=self.layouts,
            plan=self.passes.plan,
            optimizer=self.optimizer,
            schedule=self.schedule,
            norm_of_sums=None if of_step.squares is None else jnp.sqrt(of_step.squares),
        )
