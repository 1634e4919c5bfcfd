"""The part of a model that a site holds: some chunks, and what they have of the parameters."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from geojax.models import ModelConfig


@dataclasses.dataclass(frozen=True)
class SitePart:
    """Some chunks of a model, in the model's order."""

    model: ModelConfig
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
        return self.chunks[chunk].stop == self.model.num_hidden_layers

    def non_layer_names(self, chunk: int) -> tuple[str, ...]:
        """Name the parameters in no layer whose gradients are in the bucket of a chunk."""
        head = ("final_norm",) if self.model.tie_word_embeddings else ("final_norm", "head")
        return (
            *(("embedding",) if self.is_first(chunk) else ()),
            *(head if self.is_last(chunk) else ()),
        )

    def adds_table(self, chunk: int) -> bool:
        """Return True if the bucket of a chunk takes the head's gradient of a tied table."""
        has_head = any(map(self.is_last, self.chunks))
        return self.model.tie_word_embeddings and self.is_first(chunk) and has_head

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


def even_chunks(model: ModelConfig, chunks: int) -> dict[int, range]:
    """Divide the layers of a model into chunks as evenly as they go, the longer ones last."""
    ends = [model.num_hidden_layers * chunk // chunks for chunk in range(chunks + 1)]
    return {chunk: range(ends[chunk], ends[chunk + 1]) for chunk in range(chunks)}
