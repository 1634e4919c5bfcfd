"""The part of a model that a stage holds: some chunks, and what they have of the parameters.

Where a site is one stage, or holds the whole model, the part is the site's.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import traverse_util

from geojax.islands.programs.values import ChunkSums
from geojax.models import AnyModel, parameter_shapes
from geojax.models.transformer import tables_of_head
from geojax.sharding import LeafLayout


@dataclasses.dataclass(frozen=True)
class SitePart:
    """Some chunks of a model, in the model's order."""

    model: AnyModel
    chunks: Mapping[int, range]
    """The layers of each chunk of the site, by the chunk's number."""

    @property
    def layers(self) -> int:
        """The number of layers that the site holds."""
        return sum(map(len, self.chunks.values()))

    def is_first(self, chunk: int) -> bool:
        """Return True if a chunk begins with the embedding."""
        return self.chunks[chunk].start == 0

    def is_last(self, chunk: int) -> bool:
        """Return True if a chunk ends with the head."""
        return self.chunks[chunk].stop == self.model.num_stacked_layers

    @property
    def has_embedding(self) -> bool:
        """True if the site embeds tokens."""
        return any(map(self.is_first, self.chunks))

    @property
    def has_head(self) -> bool:
        """True if the site computes the loss."""
        return any(map(self.is_last, self.chunks))

    @property
    def copies_table(self) -> bool:
        """True if the site has a tied table for its head alone; another one embeds with it."""
        return self.model.head_reads_tokens and self.has_head and not self.has_embedding

    @property
    def _behind_layers(self) -> list[str]:
        """Name the parameters behind the last layer."""
        names = parameter_shapes(self.model)
        return [name for name in names if name not in ("embedding", "layers")]

    def non_layer_names(self, chunk: int) -> tuple[str, ...]:
        """Name the parameters in no layer whose gradients are in the bucket of a chunk."""
        names = ["embedding"] if self.is_first(chunk) else []
        if self.is_last(chunk):
            names += self._behind_layers
            if self.copies_table:
                names.append("embedding")
        return tuple(names)

    @property
    def holds_all(self) -> bool:
        """True if the site holds the whole model."""
        return self.layers == self.model.num_stacked_layers

    @property
    def table_chunk(self) -> int:
        """The chunk whose bucket has the table of embeddings, on a site that has one."""
        return next(chunk for chunk in self.chunks if "embedding" in self.non_layer_names(chunk))

    def table(self, buckets: Mapping[Any, Any]) -> Any:
        """Return what a head tied to the embedding reads of it, in the site's buckets."""
        return tables_of_head(buckets[self.table_chunk]["embedding"], self.model)

    def with_table(self, bucket: Any, table: Any) -> Any:
        """Return the bucket of `table_chunk` with another table."""
        leaves = traverse_util.flatten_dict(bucket["embedding"])
        leaves |= traverse_util.flatten_dict(table)
        return bucket | {"embedding": traverse_util.unflatten_dict(leaves)}

    def table_of_head(self, sums: ChunkSums) -> Any:
        """Return the head's gradient of a tied table for the bucket of the first chunk.

        Args:
            sums: those of the last chunk.

        Returns:
            The gradient; {} where the table is not tied or the site has one end of the model.
        """
        both = self.model.head_reads_tokens and self.has_embedding and self.has_head
        return sums.last["embedding"] if both else {}

    def held(self, parameters: Any) -> Any:
        """Cut what the site holds out of a tree of the model's parameters."""

        def own(leaf: jax.Array) -> jax.Array:
            return jnp.concatenate([leaf[each.start : each.stop] for each in self.chunks.values()])

        return self._held(parameters, own)

    def held_layouts(
        self, layouts: Any, of_layers: Callable[[LeafLayout], LeafLayout] | None = None
    ) -> Any:
        """Return the `LeafLayout`s of `held`, of those of the model's parameters.

        Args:
            layouts: of the model's parameters.
            of_layers: gives the layout of a stacked leaf; None: it becomes a leaf of its own, with
                the part's layers alone.
        """
        return self._held(layouts, of_layers or self.layers_layout)

    def layers_layout(self, layout: LeafLayout) -> LeafLayout:
        """Return the layout of the part's layers of a stacked leaf, as a leaf of its own."""
        return layout.of_layers(self.layers)

    def _held(self, tree: Any, of_layers: Callable[[Any], Any]) -> Any:
        made = {"layers": jax.tree.map(of_layers, tree["layers"])}
        if self.has_embedding:
            made["embedding"] = tree["embedding"]
        if self.copies_table:
            made["embedding"] = tables_of_head(tree["embedding"], self.model)
        if self.has_head:
            made |= {name: tree[name] for name in self._behind_layers}
        return made

    def layers_of(self, stacked: Any, layers: range, chunk: int) -> Any:
        """Cut consecutive `layers` of a chunk out of a tree of the site's layers, stacked."""
        offset = sum(len(own) for number, own in self.chunks.items() if number < chunk)
        first = offset + layers.start - self.chunks[chunk].start
        return jax.tree.map(lambda leaf: leaf[first : first + len(layers)], stacked)

    def bucket(self, tree: Any, chunk: int) -> Any:
        """Cut a chunk's bucket out of a tree like the parameters; None stays None."""
        if tree is None:
            return None
        own = {name: tree[name] for name in self.non_layer_names(chunk)}
        return own | {"layers": self.layers_of(tree["layers"], self.chunks[chunk], chunk)}

    def layouts_of_bucket(self, layouts: Any, chunk: int) -> Any:
        """Return the `LeafLayout`s of a chunk's bucket, of those of the parameters."""
        own = {name: layouts[name] for name in self.non_layer_names(chunk)}
        count = len(self.chunks[chunk])
        layers = jax.tree.map(lambda layout: layout.of_layers(count), layouts["layers"])
        return own | {"layers": layers}

    def join(self, buckets: Sequence[Any]) -> Any:
        """Join the buckets of all chunks, in the model's order, to a tree like the parameters."""
        joined: dict[str, Any] = {}
        for each in buckets:
            joined |= {name: tree for name, tree in each.items() if name != "layers"}
        return joined | {"layers": self.join_layers([each["layers"] for each in buckets])}

    def join_layers(self, trees: Sequence[Any]) -> Any:
        """Join trees of each chunk's layers, stacked."""
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


AUTO_CHUNKS = 4
"""Buckets of a step: so many that most travel during a backward, so few that they are large."""


def bucket_count(layers: int, bucket_layers: int | Literal["auto"]) -> int:
    """Return the number of chunks, each a bucket, of a site in role data.

    Args:
        layers: layers of the model.
        bucket_layers: most layers of a chunk; "auto": `AUTO_CHUNKS` chunks, or as many as layers.
    """
    if bucket_layers == "auto":
        return min(layers, AUTO_CHUNKS)
    return math.ceil(layers / bucket_layers)


def even_chunks(model: AnyModel, chunks: int) -> dict[int, range]:
    """Divide the layers of a model into chunks as evenly as they go, the longer ones last."""
    ends = [model.num_stacked_layers * chunk // chunks for chunk in range(chunks + 1)]
    return {chunk: range(ends[chunk], ends[chunk + 1]) for chunk in range(chunks)}
