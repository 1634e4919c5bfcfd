"""The model's loss and gradients with weights and batch spread over a mesh, and put together again.

What `geojax.train` does with shards of a training state is done here in the plainest way.
"""

import math

import jax
import numpy as np
from jax.sharding import PartitionSpec

import geojax
from geojax.collectives.axes import drop_single, split_by_size, to_varying, varying_axes
from geojax.models import loss_sum
from geojax.models.parallel.partition import partitions
from geojax.models.parallel.sequence_order import position_order

_BATCH_AXES = ("dc", "data", "expert", "context")


def mesh_of(parallelism, **axes):
    """A mesh of exactly the ranks that `parallelism` and the other `axes` take."""
    axes |= {name: getattr(parallelism, name) for name in ("tensor", "context", "expert")}
    return geojax.make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)


def spread_step(config, parallelism, mesh, dropout_key=None, **options):
    """A jitted function of `spread`'s results, to (sums of loss and mask, gradients) of all ranks.

    Options are those of `loss_sum`.
    """
    places = partitions(config, parallelism)
    specs = jax.tree.map(_spec, places)

    def step(parameters, batch):
        def varying(leaf, place):
            return to_varying(leaf, (*_BATCH_AXES, "tensor") if place.partial else _BATCH_AXES)

        def loss(parameters):
            return loss_sum(
                parameters,
                batch,
                config,
                dropout_key=dropout_key,
                parallelism=parallelism,
                **options,
            )

        parameters = jax.tree.map(varying, parameters, places)
        sums, gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        gradients = jax.tree.map(lambda leaf, place: _summed(leaf, place.axes), gradients, places)
        return jax.tree.map(lambda leaf: _summed(leaf, set()), sums), gradients

    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, batch_specs()),
        out_specs=(PartitionSpec(), specs),
    )
    return jax.jit(sharded)


def batch_specs():
    cut = PartitionSpec(("dc", "data", "expert"), "context")
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    return dict.fromkeys(names, cut) | {"row": PartitionSpec(("dc", "data", "expert"))}


def spread(parameters, batch, config, parallelism):
    """What `spread_step` takes: the vocabulary padded, the columns in the order of the ranks."""
    order = position_order(batch["tokens"].shape[1], parallelism)
    columns = {
        name: leaf if name == "row" else np.take(leaf, order, axis=1)
        for name, leaf in batch.items()
    }

    def padded(leaf, place):
        sizes = [
            -leaf.shape[dim] % math.prod(getattr(parallelism, axis) for axis in axes)
            for dim, axes in place.axes_by_dim.items()
        ]
        widths = [(0, 0)] * leaf.ndim
        for dim, size in zip(place.axes_by_dim, sizes, strict=True):
            widths[dim] = (0, size)
        return np.pad(leaf, widths)

    return jax.tree.map(padded, parameters, partitions(config, parallelism)), columns


def assert_close(got, want, bound=1e-10):
    """Every leaf to `bound` of its largest value; what `got` has beyond `want`'s shape is zero."""

    def check(path, mine, theirs):
        inside = np.asarray(mine)[tuple(slice(size) for size in theirs.shape)]
        name = jax.tree_util.keystr(path)
        error = np.abs(inside - theirs).max() / max(np.abs(theirs).max(), 1e-3)
        assert error <= bound, f"{name}: off by {error:.1e}"
        assert np.count_nonzero(mine) == np.count_nonzero(inside), f"{name}: padding is not zero"

    jax.tree_util.tree_map_with_path(check, got, want)


def _spec(place):
    dims = [place.axes_by_dim.get(dim) for dim in range(max(place.axes_by_dim, default=-1) + 1)]
    return PartitionSpec(*dims)


def _summed(leaf, cut):
    long, single, _ = split_by_size(tuple(sorted(varying_axes(leaf) - cut)))
    leaf = drop_single(leaf, single)
    return jax.lax.psum(leaf, long) if long else leaf
