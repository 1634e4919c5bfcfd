"""Sharding of one model over the ranks that share it."""

import dataclasses
from typing import Literal

ContextMethod = Literal["ring", "all_gather", "ulysses"]
"""Context parallelism of attention. ring: blocks of keys and values travel around the ranks (Liu et
al. 2023, "Ring Attention with Blockwise Transformers"). all_gather: every rank gathers all keys and
values ("The Llama 3 Herd of Models", 2024, section 3.3.2). ulysses: an all-to-all trades a share of
the sequence for a share of the heads (Jacobs et al. 2023, "DeepSpeed Ulysses")."""


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """The sizes of the mesh axes that hold parts of one model or of one sequence.

    With all sizes 1 nothing is sharded, and the model's functions may be called anywhere. Otherwise
    call them inside a `shard_map` that is manual over axes of these names and sizes. They take this
    rank's shards of the weights (`geojax.models.parallel.partition`) and of the batch's sequences
    (`geojax.models.parallel.sequence_order`).
    """

    tensor: int = 1
    """Ranks that share every layer (tensor parallelism; Shoeybi et al. 2019, "Megatron-LM")."""

    sequence: bool = False
    """Sequence parallelism: the ranks of `tensor` also shard the sequence between the matmuls, for
    norms, dropout and residual stream (Korthikanti et al. 2022, "Reducing Activation Recomputation
    in Large Transformer Models")."""

    chunks: int = 1
    """Parts of a rank's positions that enter and leave the products of `tensor` one after another,
    with sequence parallelism: one travels while another is multiplied."""

    context: int = 1
    """Ranks that share one sequence everywhere (context parallelism)."""

    context_method: ContextMethod = "ring"
    """Method of attention over that sequence."""

    expert: int = 1
    """Ranks that share the experts (expert parallelism)."""

    vocabulary_stages: int = 1
    """Stages of a pipeline that share the vocabulary with the ranks of `tensor` (Yeung et al. 2024,
    "Balancing Pipeline Parallelism with Vocabulary Parallelism")."""

    @property
    def vocabulary_axes(self) -> tuple[str, ...]:
        """The mesh axes whose ranks share the vocabulary, the last one fastest."""
        sizes = {"stage": self.vocabulary_stages, "tensor": self.tensor}
        return tuple(axis for axis, size in sizes.items() if size > 1)

    @property
    def vocabulary_ranks(self) -> int:
        """The number of ranks that share the vocabulary."""
        return self.vocabulary_stages * self.tensor


SINGLE_DEVICE = Parallelism()
"""One device holds the unsharded model and whole sequences."""
