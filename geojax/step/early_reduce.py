"""Reduce parts of a pipeline's gradients while the backward of others runs.

The head and all chunks but a stage's first are whole some ticks before the step's last backward
(`geojax.pipeline.execution.ready_parts`). There the loop over ticks ends, the part is summed in the
site, and its shards leave; the next loop does not wait for them:

    ticks     .. B3 │ B3 ..       │ B2 ..        │ B1 ..        │ B0 ..        │
    head            └ all-reduce ─┤              │              │              │
    chunk 3                       └ all-reduce ──┤              │              │
    chunk 2                                      └ all-reduce ──┤              │
    chunk 1                                                     └ all-reduce ──┤
    the rest: chunk 0, embedding, norms                                        └ all-reduce

Each part is one message, and the next one waits for it: XLA for GPUs never has two collectives in
flight that share more than one device, and two sums over the sites share two. For the same reason a
part holds only leaves that can share a message, those with the most numbers; the others, norms for
example, are left to the rest.

With `bucket_layers` of several chunks, so many neighboring chunks are one part, counted from the
stage's first chunk. The first ones are then in the rest together. Fewer messages take fewer round
trips, and leave later.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from geojax.collectives.buckets import BlockLayout
from geojax.models import Parameters
from geojax.models.chunk.layer_io import layers_slice
from geojax.named_arrays import leaves_by_name
from geojax.optim.leaf_groups import largest_group
from geojax.pipeline.execution import StageWeights
from geojax.pipeline.execution.ready_parts import Part, ready_parts
from geojax.sharding import LeafLayout
from geojax.step.grad_reduce import (
    GradReduce,
    ReducedGradients,
    padded,
    reduce_gradients,
    start_grad_reduce,
)
from geojax.step.plan import StepPlan

WHOLE = -1
"""The number of the chunk in the name of a piece that is not cut into chunks."""

Piece = tuple[str, int]
"""A leaf by name, and the number of the chunk on its stage whose layers it holds, or `WHOLE`."""


_Taken = jax.Array | dict[Piece, jax.Array]
"""A part of the gradients: one message [ranks of the site, numbers of each], or its leaves."""


@dataclasses.dataclass(frozen=True)
class EarlyReduce:
    """The reduction of a stage's gradients, part by part."""

    layouts: Parameters
    """The `LeafLayout` of each parameter."""
    plan: StepPlan
    error_feedback: Any
    """The errors of the step before (see `geojax.step.error_feedback`); None: none are kept."""
    to_parameters: Callable[[StageWeights], Parameters]
    """Brings a stage's gradients into the structure of the parameters, without amax."""

    @property
    def parts(self) -> dict[Part, int]:
        """The tick after which each part is ready."""
        return early_parts(self.layouts, self.plan)

    @property
    def overlaps_scatter(self) -> bool:
        """True if a part is summed in the site beside ticks."""
        return self.plan.overlap_scatter

    def take(self, part: Part, sums: StageWeights) -> _Taken:
        """Copy a part of the gradients; others of `sums` are not read.

        Leaves that are scattered in the site are copied into one message, so that no further copy
        is made of them.
        """
        taken = self._cut(self.to_parameters(sums), self._pieces[part])
        rows = self._rows(part)
        if rows is None:
            return taken
        return jnp.concatenate(
            [each.to_rows(padded(taken[name], self._pieces[part][name])) for name, each in rows],
            axis=1,
        )

    def start(self, part: Part, taken: _Taken) -> GradReduce:
        """Sum a part in the site, ready to be exchanged."""
        layouts, plan = self._pieces[part], self.plan.one_message
        errors, own_stream = self._errors(layouts), self.overlaps_scatter
        if not isinstance(taken, dict):
            taken = self._unpacked(part, taken)
        return start_grad_reduce(taken, errors, layouts, plan, own_stream=own_stream)

    def exchange(self, started: GradReduce) -> GradReduce:
        """Send a part to the other sites, and receive theirs, beside the collectives of ticks."""
        return started.exchange(own_stream=True)

    def finish(self, exchanged: Mapping[Part, GradReduce], sums: StageWeights) -> ReducedGradients:
        """Reduce the rest, and join all parts."""
        layouts = self._pieces["rest"]
        rest = self._cut(self.to_parameters(sums), layouts)
        made = [reduce_gradients(rest, self._errors(layouts), layouts, self.plan)]
        made += [each.done() for each in exchanged.values()]
        errors = None
        if self.error_feedback is not None:
            errors = self._joined([each.error_feedback for each in made])
        return ReducedGradients(self._joined([each.gradients for each in made]), errors)

    def _rows(self, part: Part) -> list[tuple[Piece, BlockLayout]] | None:
        """Return how a part's leaves lie in a message, in its order; None: they share none."""
        of_part, found = self._pieces[part], []
        for name in sorted(of_part):
            shard, shape = of_part[name].shard, of_part[name].model_shard_shape
            if shard is None or "dc" in shard.axes:
                return None
            found.append((name, BlockLayout(shape, shard.dim, shard.ranks)))
        return found

    def _unpacked(self, part: Part, message: jax.Array) -> dict[Piece, jax.Array]:
        rows = self._rows(part)
        assert rows is not None, "leaves of a message are scattered"
        ends = list(itertools.accumulate(each.columns for _, each in rows))
        cut = jnp.split(message, ends[:-1], axis=1)
        return {name: each.from_rows(own) for (name, each), own in zip(rows, cut, strict=True)}

    @functools.cached_property
    def _pieces(self) -> dict[Part | Literal["rest"], dict[Piece, LeafLayout]]:
        return pieces(self.layouts, self.plan)

    def _errors(self, names: Iterable[Piece]) -> Any:
        return None if self.error_feedback is None else self._cut(self.error_feedback, names)

    def _cut(self, tree: Parameters, names: Iterable[Piece]) -> dict[Piece, jax.Array]:
        """Cut pieces out of a tree like the parameters."""
        leaves = leaves_by_name(tree)
        count = self.plan.stages.max_layers_per_chunk

        def cut(leaf: jax.Array, chunk: int) -> jax.Array:
            piece: jax.Array = layers_slice(leaf, jnp.int32(chunk * count), count)
            return piece

        return {
            (name, chunk): leaves[name] if chunk == WHOLE else cut(leaves[name], chunk)
            for name, chunk in names
        }

    def _joined(self, parts: Iterable[Mapping[Piece, jax.Array]]) -> Parameters:
        """Join the pieces of all parts to a tree like the parameters."""
        by_leaf: dict[str, dict[int, jax.Array]] = {}
        for part in parts:
            for (name, chunk), piece in part.items():
                by_leaf.setdefault(name, {})[chunk] = piece

        def leaf(name: str) -> jax.Array:
            chunks = by_leaf[name]
            if WHOLE in chunks:
                return chunks[WHOLE]
            return jnp.concatenate([chunks[chunk] for chunk in sorted(chunks)])

        names = list(leaves_by_name(self.layouts))
        joined: Parameters = jax.tree.unflatten(
            jax.tree.structure(self.layouts), [leaf(name) for name in names]
        )
        return joined


def pieces(
    layouts: Parameters, plan: StepPlan
) -> dict[Part | Literal["rest"], dict[Piece, LeafLayout]]:
    """Return the layouts of what is reduced together: each early part, then the rest.

    Args:
        layouts: the `LeafLayout` of each parameter.
        plan: how the step runs, with a pipeline.
    """
    leaves = leaves_by_name(layouts)
    in_layers = _largest_group({name: leaves[name] for name in leaves if _is_in_layers(name)})
    early = early_parts(layouts, plan)
    of_head: Mapping[str, LeafLayout] = {}
    if "head" in early:
        of_head = _largest_group({name: leaves[name] for name in leaves if _is_in_head(name)})
    count = plan.stages.max_layers_per_chunk

    def of_chunks(numbers: Iterable[int]) -> dict[Piece, LeafLayout]:
        return {
            (name, number): leaf.of_layers(count)
            for number in numbers
            for name, leaf in in_layers.items()
        }

    parts: dict[Part | Literal["rest"], dict[Piece, LeafLayout]] = {
        part: {(name, WHOLE): leaf for name, leaf in of_head.items()}
        if part == "head"
        else of_chunks(_chunks_of(part, plan))
        for part in early
    }
    rest = {
        (name, WHOLE): leaf
        for name, leaf in leaves.items()
        if name not in in_layers and name not in of_head
    }
    for number in range(plan.stages.placement.chunks_per_stage):
        if _part_of(number, plan) not in early:
            rest |= of_chunks([number])
    return parts | {"rest": rest}


def early_parts(layouts: Parameters, plan: StepPlan) -> dict[Part, int]:
    """Return the ticks after which parts leave early, in order of these ticks.

    Several chunks that leave together are named by the first of them. A tied or frozen head is no
    part.
    """
    ready = ready_parts(plan.program.ticks)
    has_head = bool(jax.tree.leaves(layouts.get("head")))
    parts: dict[Part, int] = {}
    for part, tick in ready.items():
        if part == "head":
            if has_head:
                parts[part] = tick
        elif all(chunk in ready for chunk in _chunks_of(_part_of(part, plan), plan)):
            first = _part_of(part, plan)
            parts[first] = max(parts.get(first, 0), tick)
    return {part: parts[part] for part in sorted(parts, key=parts.__getitem__)}


def _largest_group(leaves: Mapping[str, LeafLayout]) -> dict[str, LeafLayout]:
    """Return the leaves that can share a message, of the group with the most numbers."""

    def key(leaf: LeafLayout) -> Hashable:
        model_axes = frozenset(axis for sharding in leaf.model_shards for axis in sharding.axes)
        return leaf.shard and leaf.shard.axes, model_axes, leaf.partial

    names, layouts = list(leaves), list(leaves.values())
    return {names[each]: layouts[each] for each in largest_group(map(key, layouts), layouts)}


def _is_in_layers(name: str) -> bool:
    return name.startswith("layers.")


def _is_in_head(name: str) -> bool:
    return not name.startswith(("layers.", "embedding"))


def _part_of(chunk: int, plan: StepPlan) -> int:
    """Return the first chunk of those that leave together with this one."""
    together = _chunks_together(plan)
    return chunk // together * together


def _chunks_of(part: int, plan: StepPlan) -> range:
    """Return the chunks that leave together with this one, the first of them."""
    return range(part, min(part + _chunks_together(plan), plan.stages.placement.chunks_per_stage))


def _chunks_together(plan: StepPlan) -> int:
    return max(1, plan.bucket_layers // plan.stages.max_layers_per_chunk)
