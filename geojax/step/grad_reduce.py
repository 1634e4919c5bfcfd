"""What `geojax.step.weights.sum_shards` does, in phases that are the caller's to place.

See `geojax.collectives.in_flight` for what that is good for.
"""

import dataclasses
import functools
from typing import Any

import jax

from geojax.collectives import AllReduce, hierarchical_all_reduce, start_all_reduce
from geojax.step.plan import StepPlan
from geojax.step.weights import Summed, reduced_together, scatter_across


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sums"],
    meta_fields=["members", "structure", "errors"],
)
@dataclasses.dataclass(frozen=True)
class SumInFlight:
    """A sum of shards that `start_sum` has begun; a pytree."""

    sums: tuple[AllReduce | list[jax.Array], ...]
    """Of leaves that are reduced together. A list: those whose shards are cut over `dc`."""
    members: tuple[tuple[int, ...], ...]
    """The positions of those leaves."""
    structure: Any
    errors: tuple[tuple[int, ...], ...] | None
    """The shapes of the errors; None: none are kept."""

    def cross(self, layouts: Any, plan: StepPlan) -> "SumInFlight":
        """What all sites have started crosses between them."""
        places = jax.tree.leaves(layouts)

        def crossed(begun: AllReduce | list[jax.Array], members: tuple[int, ...]) -> Any:
            if isinstance(begun, AllReduce):
                return begun.cross()
            return scatter_across(begun, [places[i] for i in members], plan)

        return dataclasses.replace(self, sums=tuple(map(crossed, self.sums, self.members)))

    def finish(self) -> Summed:
        """Each rank's shards, of what has crossed."""
        totals: dict[int, jax.Array] = {}
        errors: dict[int, jax.Array] = {}
        for begun, members in zip(self.sums, self.members, strict=True):
            total, error = begun.finish() if isinstance(begun, AllReduce) else (begun, None)
            totals.update(zip(members, total, strict=True))
            errors.update(zip(members, error or (), strict=error is not None))
        summed = jax.tree.unflatten(self.structure, [totals[i] for i in range(len(totals))])
        if self.errors is None:
            return Summed(summed, None)
        held = [errors[i].reshape(shape) for i, shape in enumerate(self.errors)]
        return Summed(summed, jax.tree.unflatten(self.structure, held))


@jax.named_scope("reduce_gradients")
def start_sum(shards: Any, errors: Any, layouts: Any, plan: StepPlan) -> SumInFlight:
    """The first phase of `sum_shards`, without a pipeline."""
    assert plan.staged_layers is None, "stages have nothing to do while their gradients travel"
    leaves, structure = jax.tree.flatten(shards)
    places = jax.tree.leaves(layouts)
    held = None if errors is None else jax.tree.leaves(errors)
    groups = reduced_together(leaves, places, plan)
    sums: list[AllReduce | list[jax.Array]] = []
    for ((_, across), beside, _), members in groups.items():
        own = [leaves[i] for i in members]
        if across:
            sums.append(hierarchical_all_reduce(own, beside, (), chunk_bytes=plan.chunk_bytes))
            continue
        before = held and [held[i].reshape(places[i].shard_shape) for i in members]
        sums.append(
            start_all_reduce(
                own,
                before,
                beside,
                plan.outer_axes,
                chunk_bytes=plan.chunk_bytes,
                wire=plan.wire,
            )
        )
    return SumInFlight(
        tuple(sums),
        tuple(map(tuple, groups.values())),
        structure,
        None if held is None else tuple(error.shape for error in held),
    )
