"""The layout of each leaf of the training state: in shards on a mesh, whole in a checkpoint.

The model shards a leaf into *parts*, of which a rank computes with its own (tensor and expert
parallelism). ZeRO cuts a part further into *shards* along one dimension, one for each rank that
computes with the same part, and gathers them when they are needed.

A dimension that does not divide into its parts is padded at its end. A part that does not divide
into its shards is padded at its own end, so that ZeRO keeps the model's cuts in place. The padding
is not the model's: `LeafLayout.model_indices` tells the two apart, by which a checkpoint restores
onto any other mesh. With a pipeline `pad` and `trim` also bring the layers of a leaf to the stages
that hold them (`StageAssignment`) and back.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.models.parallel.partition import UNPARTITIONED, Partition
from geojax.sharding.stage_assignment import PADDING_LAYER, StageAssignment

PADDING = PADDING_LAYER
"""The index of a position that the model does not have."""

SHARD_AXES = ("data", "expert")
"""The axes inside a site over which the training state is sharded (ZeRO)."""


@dataclasses.dataclass(frozen=True)
class DimSharding:
    """A dimension that is cut into equal, contiguous blocks, one for each rank."""

    dim: int
    axes: tuple[str, ...]
    """The mesh axes whose ranks hold the blocks, the last one fastest."""

    ranks: int
    """Over all of `axes`."""


class Place(NamedTuple):
    """One position in a dimension."""

    dim: int
    position: int


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """One leaf: its shape, the model's parts of it, and ZeRO's shards of each part."""

    shape: tuple[int, ...]
    dtype: Any
    model_shards: tuple[DimSharding, ...] = ()
    """The dims that the model shards, each once."""

    shard: DimSharding | None = None
    """ZeRO's sharding of each part; None where every rank holds its part unsharded. Where model and
    ZeRO shard one dimension, the part is the outer block."""

    partial: bool = False
    """True if each tensor rank has the leaf unsharded and computes a part of its gradient."""

    wide: bool = False
    """True if it is gathered and computed with in at least float32."""

    fp8: bool = False
    """True if layers with an FP8 recipe multiply by it in FP8."""

    stages: StageAssignment | None = None
    """The layers that the stages of a pipeline hold; None where there is no pipeline. On devices a
    leaf that does not count layers gets a leading dim of stages then. `model_shards` and `shard` go
    by the dims of `shape`, without it."""

    place: Place | None = None
    """The one position in a dim that all devices hold, where other runtimes hold the others."""

    def gathered_dtype(self, compute_dtype: Any) -> Any:
        """Return the dtype that the leaf is gathered and computed with."""
        return jnp.promote_types(compute_dtype, jnp.float32) if self.wide else compute_dtype

    def computed_in(self, compute_dtype: Any) -> "LeafLayout":
        """Return the layout of the leaf as it is computed with."""
        return dataclasses.replace(self, dtype=jnp.dtype(self.gathered_dtype(compute_dtype)))

    @property
    def stage_shape(self) -> tuple[int, ...]:
        """The shape of what one stage holds, whole and without padding but for padding layers."""
        shape = list(self.shape)
        if self.stages is not None and self.stages.stacked:
            shape[0] = self.stages.layers_per_stage
        if self.place is not None:
            shape[self.place.dim] = 1
        return tuple(shape)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape on the devices: each cut dimension rounded up to a multiple of its blocks, and
        the layers of all stages."""
        padded = self._rounded_up(self.stage_shape)
        if self.stages is None:
            return padded
        layers = self.stages.stages * self.stages.layers_per_stage
        return (layers, *(padded[1:] if self.stages.stacked else padded))

    @property
    def model_shard_shape(self) -> tuple[int, ...]:
        """The shape of one part of what a stage holds, padding included: all its shards together.
        A leaf that does not count layers has its own dimensions here, no leading one."""
        blocks = self._blocks(self.model_shards)
        padded = self._rounded_up(self.stage_shape)
        return tuple(s // count for s, count in zip(padded, blocks, strict=True))

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """The shape of what one rank computes with: a part's padding stays, that of shards goes."""
        return self._per_part(self.stage_shape)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of what one device holds between steps."""
        blocks = self._blocks((self.shard,) if self.shard else ())
        shard = tuple(s // count for s, count in zip(self.model_shard_shape, blocks, strict=True))
        return (1, *shard) if self.has_stage_dim else shard

    @property
    def has_stage_dim(self) -> bool:
        """True if the leaf has a leading dimension on the devices that it lacks in the model."""
        return self.stages is not None and not self.stages.stacked

    def padded_axes(self) -> list[tuple[str, ...]]:
        """Return the mesh axes that cut each dim of the padded leaf."""
        axes = self._axes()
        if self.stages is not None and not self.stages.stacked:
            axes.insert(0, self.stages.axes)
        return axes

    def spec(self) -> PartitionSpec:
        """Return the partition spec of the padded leaf."""
        return _partition_spec(self.padded_axes())

    def model_indices(self) -> tuple[np.ndarray, ...]:
        """Return along each dim of the padded leaf the model's index of each position.

        It is `PADDING` where the model has none. Along a leading dim of stages it is 0 for a stage
        that holds the leaf.
        """
        dims = []
        for length, (count, size, part) in zip(self.shape, self._sizes(), strict=True):
            block, offset = np.divmod(np.arange(count * part), part)
            index = block * size + offset
            dims.append(np.where((offset < size) & (index < length), index, PADDING))
        if self.place is not None:
            dims[self.place.dim] = np.array([self.place.position])
        if self.stages is None:
            return tuple(dims)
        layers = np.array(self.stages.order)
        return (layers, *(dims[1:] if self.stages.stacked else dims))

    def model_spec(self) -> PartitionSpec:
        """Return the partition spec of the model's leaf, if it divided."""
        return _partition_spec(self._axes())

    def pad(self, leaf: jax.Array) -> jax.Array:
        """Pad the model's leaf as it is on the devices.

        Zeros are appended where dims or their parts do not divide, and layers are brought to their
        stages.
        """
        for dim, (count, size, part) in enumerate(self._sizes()):
            leaf = _append(leaf, dim, count * size)
            if part > size:
                leaf = _merge(_append(_split(leaf, dim, count), dim + 1, part), dim)
        return leaf if self.stages is None else self.stages.to_stages(leaf)

    def trim(self, leaf: jax.Array) -> jax.Array:
        """Invert `pad`: return the model's leaf, in its order; of a NumPy array a NumPy array."""
        leaf = leaf if self.stages is None else self.stages.from_stages(leaf)
        for dim, (count, size, part) in enumerate(self._sizes()):
            if part > size:
                within = (slice(None),) * (dim + 1)
                leaf = _merge(_split(leaf, dim, count)[(*within, slice(size))], dim)
        if leaf.shape == self.shape:
            return leaf
        return leaf[tuple(slice(size) for size in self.shape)]

    def of_layer(self) -> "LeafLayout":
        """Return the layout of one layer of this stacked leaf; with a pipeline, on its stage."""

        def without_layers_dim(sharding: DimSharding) -> DimSharding:
            assert sharding.dim > 0, "the layers of a stacked leaf are never sharded"
            return dataclasses.replace(sharding, dim=sharding.dim - 1)

        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            model_shards=tuple(without_layers_dim(sharding) for sharding in self.model_shards),
            shard=without_layers_dim(self.shard) if self.shard else None,
            stages=None,
        )

    def without_dim(self, dim: int) -> "LeafLayout":
        """Return the layout of a leaf like this one that lacks a dim, say of means over it.

        Args:
            dim: a negative one; never the layers'.
        """
        gone = dim + len(self.shape)

        def moved(sharding: DimSharding | None) -> DimSharding | None:
            if sharding is None or sharding.dim == gone:
                return None
            return dataclasses.replace(sharding, dim=sharding.dim - (sharding.dim > gone))

        return dataclasses.replace(
            self,
            shape=(*self.shape[:gone], *self.shape[gone + 1 :]),
            model_shards=tuple(filter(None, map(moved, self.model_shards))),
            shard=moved(self.shard),
        )

    def of_layers(self, count: int) -> "LeafLayout":
        """Return the layout of `count` layers of this leaf; with a pipeline, on their stage."""
        return dataclasses.replace(self, shape=(count, *self.shape[1:]), stages=None)

    def at_site(self, dim: int, site: int, sites: int) -> "LeafLayout":
        """Return the layout as one site's of a leaf that counts `sites` sites along `dim`."""
        shape = (*self.shape[:dim], sites, *self.shape[dim + 1 :])
        return dataclasses.replace(self, shape=shape, place=Place(dim, site))

    @property
    def dim_shardings(self) -> tuple[DimSharding, ...]:
        """The dims that the model shards, then the one that ZeRO shards."""
        return (*self.model_shards, self.shard) if self.shard else self.model_shards

    def _axes(self) -> list[tuple[str, ...]]:
        """Return the mesh axes that cut each dim of `shape`."""
        axes = [
            tuple(
                axis
                for sharding in self.dim_shardings
                if sharding.dim == dim
                for axis in sharding.axes
            )
            for dim in range(len(self.shape))
        ]
        if self.stages is not None and self.stages.stacked:
            assert not axes[0], "the layers of a stacked leaf are sharded by stages alone"
            axes[0] = self.stages.axes
        return axes

    def _rounded_up(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `shape` with each cut dim rounded up to a multiple of its blocks."""
        sizes = zip(shape, self._blocks(self.dim_shardings), strict=True)
        return tuple(-(-size // count) * count for size, count in sizes)

    def _per_part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size of one part of `shape`, without the padding of shards."""
        sizes = zip(shape, self._blocks(self.model_shards), strict=True)
        return tuple(-(-size // count) for size, count in sizes)

    def _sizes(self) -> list[tuple[int, int, int]]:
        """Return (parts, their size, their size padded for shards) of each dim of the leaf."""
        blocks = self._blocks(self.model_shards)
        rounded = zip(self._rounded_up(self.shape), blocks, strict=True)
        padded = [size // count for size, count in rounded]
        return list(zip(blocks, self._per_part(self.shape), padded, strict=True))

    def _blocks(self, dim_shardings: Sequence[DimSharding]) -> list[int]:
        return [
            math.prod(sharding.ranks for sharding in dim_shardings if sharding.dim == dim)
            for dim in range(len(self.shape))
        ]


def _append(leaf: jax.Array, dim: int, size: int) -> jax.Array:
    """Append zeros to `leaf` along `dim`, up to `size`."""
    missing = [(0, size - length if at == dim else 0) for at, length in enumerate(leaf.shape)]
    return jnp.pad(leaf, missing) if any(end for _, end in missing) else leaf


def _split(leaf: jax.Array, dim: int, count: int) -> jax.Array:
    """Split `dim` of `leaf` into two: the block and the index in it."""
    return leaf.reshape(*leaf.shape[:dim], count, -1, *leaf.shape[dim + 1 :])


def _merge(leaf: jax.Array, dim: int) -> jax.Array:
    """Invert `_split`."""
    return leaf.reshape(*leaf.shape[:dim], -1, *leaf.shape[dim + 2 :])


def _partition_spec(axes: list[tuple[str, ...]]) -> PartitionSpec:
    """Return the spec of the axes of each dim, without trailing dims that are not cut."""
    sharded_dims = [dim for dim, names in enumerate(axes) if names]
    return PartitionSpec(*(names or None for names in axes[: max(sharded_dims, default=-1) + 1]))


def leaf_layout(
    shape: Sequence[int],
    dtype: Any,
    shard_axes: dict[str, int],
    *,
    stacked: bool,
    model_shards: tuple[DimSharding, ...] = (),
    partition: Partition = UNPARTITIONED,
    stages: StageAssignment | None = None,
) -> LeafLayout:
    """Lay out a leaf that the model shards and that ZeRO shards further over `shard_axes`.

    The first dimension of a part that divides is sharded: the further out it is, the longer are
    the contiguous runs that are copied around every message. Where none divides it is the largest,
    which wastes least. The leading dimension of a `stacked` leaf counts layers and is never
    sharded, so that one layer's weights can be gathered without the others'.

    Args:
        shape: the whole leaf's.
        dtype: of the state's leaf.
        shard_axes: size by name of the axes to shard over; none: each rank holds its part whole.
        stacked: whether the leading dimension counts layers.
        model_shards: the dims that the model shards.
        partition: what else the model says of it.
        stages: see `LeafLayout`.
    """
    unsharded = LeafLayout(
        tuple(shape),
        jnp.dtype(dtype),
        model_shards,
        partial=partition.partial,
        wide=partition.wide,
        fp8=partition.fp8,
        stages=stages,
    )
    if stages is not None and stacked:
        layers = set(stages.order) - {PADDING_LAYER}
        assert layers == set(range(shape[0])), (
            f"the stages must hold all of {shape[0]} layers; got {sorted(layers)}"
        )
    if not shard_axes:
        return unsharded
    ranks = math.prod(shard_axes.values())
    candidates = list(range(1 if stacked else 0, len(shape)))
    assert candidates, f"a leaf of shape {shape} has no dimension to shard"
    size = unsharded.model_shard_shape
    dividing = [dim for dim in candidates if size[dim] % ranks == 0]
    dim = dividing[0] if dividing else max(candidates, key=lambda dim: size[dim])
    return dataclasses.replace(unsharded, shard=DimSharding(dim, tuple(shard_axes), ranks))


def parameter_layouts(
    parameters: Any,
    mesh: Mesh,
    partitions: Any = None,
    *,
    sharded: bool = True,
    across_sites: bool = False,
    stages: Any = None,
) -> Any:
    """Return a `LeafLayout` for each leaf of the parameter tree (arrays or shapes).

    Args:
        parameters: the tree.
        mesh: the mesh, with all six axes.
        partitions: the `Partition` of each leaf; None: the model cuts none.
        sharded: whether ZeRO shards the parts, over those of `SHARD_AXES` that do not cut them.
        across_sites: whether it shards them over `dc` too.
        stages: the `StageAssignment` of each leaf; None: there is no pipeline.
    """
    if partitions is None:
        partitions = jax.tree.map(lambda _: UNPARTITIONED, parameters)
    if stages is None:
        stages = jax.tree.map(lambda _: None, parameters)

    def layout(
        path: tuple[Any, ...], leaf: Any, partition: Partition, assignment: StageAssignment | None
    ) -> LeafLayout:
        model_shards = tuple(
            DimSharding(dim, axes, math.prod(mesh.shape[axis] for axis in axes))
            for dim, axes in partition.axes_by_dim.items()
        )
        axes = [axis for axis in SHARD_AXES if axis not in partition.axes]
        if across_sites:
            axes.append("dc")  # the fastest: what a site gathers first is contiguous
        return leaf_layout(
            leaf.shape,
            leaf.dtype,
            {axis: mesh.shape[axis] for axis in axes} if sharded else {},
            stacked=getattr(path[0], "key", None) == "layers",
            model_shards=model_shards,
            partition=partition,
            stages=assignment,
        )

    return jax.tree_util.tree_map_with_path(layout, parameters, partitions, stages)


def replicated(leaf: Any) -> LeafLayout:
    """Return the layout of a leaf that every device holds whole (a count, say)."""
    return LeafLayout(tuple(leaf.shape), jnp.dtype(leaf.dtype))


def shardings(layouts: Any, mesh: Mesh) -> Any:
    """Return the `NamedSharding` of each padded leaf."""
    return jax.tree.map(lambda layout: NamedSharding(mesh, layout.spec()), layouts)


def abstract(layouts: Any, mesh: Mesh) -> Any:
    """Return the padded state as `jax.ShapeDtypeStruct`s with their shardings."""
    return jax.tree.map(
        lambda layout: jax.ShapeDtypeStruct(
            layout.padded_shape, layout.dtype, sharding=NamedSharding(mesh, layout.spec())
        ),
        layouts,
    )


def bytes_per_device(layouts: Any) -> int:
    """Count the bytes of the state that one device holds, padding included."""
    leaves = jax.tree.leaves(layouts)
    return sum(math.prod(layout.shard_shape) * layout.dtype.itemsize for layout in leaves)
