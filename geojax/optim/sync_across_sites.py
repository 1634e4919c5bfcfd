"""Sums of updates over sites, as a transformation for any optax chain."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from geojax.collectives import WireFormat, all_reduce
from geojax.collectives.axes import AxisNames, SiteAxes, to_varying, varying_axes
from geojax.collectives.reduction import BucketBytes
from geojax.errors import UserError


class SyncAcrossSitesState(NamedTuple):
    """The rounding errors of the last sums, to be added to the next."""

    error_feedback: Any
    """Like the parameters, with a leading dimension of sites: [sites, ...] outside of a shard_map,
    where its spec begins with the axis between sites, and [1, ...] inside. None: none is kept."""


def sync_across_sites(
    intra: AxisNames = "data",
    inter: AxisNames = "dc",
    *,
    mean: bool = False,
    bucket_bytes: BucketBytes = "auto",
    wire: WireFormat | None = None,
) -> optax.GradientTransformation:
    """Sum the updates of all ranks: inside a site over `intra`, then between sites over `inter`.

    The first link of an optax chain whose `update` runs inside a `jax.shard_map`. Every rank gives
    the gradients of its own part of the batch and gets those of the whole. With a wire format that
    needs error feedback the errors are this link's state, which `init` makes inside a `shard_map`
    too.

    Args:
        intra: the mesh axes inside a site.
        inter: the mesh axes between sites.
        mean: divide the sums by the number of ranks.
        bucket_bytes: the most bytes of one message inside the site; None, a message for each leaf;
            "auto", 64 MiB with a wire format and a message for each leaf without.
        wire: the format in which numbers cross `inter`; None, as they are.

    Raises:
        UserError: (by `update`) updates that `jax.grad` has summed already, or an unknown axis.

    Example:
        >>> mesh = geojax.make_mesh(dc=2, data=4)
        >>> optimizer = optax.chain(sync_across_sites(mean=True), optax.sgd(0.5))
        >>> def step(weights, x):  # the same weights on every device; x [1], its own example
        ...     def loss(own):
        ...         return jnp.sum(own * x)
        ...     own = jax.lax.pcast(weights, ("dc", "data"), to="varying")
        ...     updates, _ = optimizer.update(jax.grad(loss)(own), optimizer.init(weights))
        ...     return optax.apply_updates(weights, updates)
        >>> program = jax.shard_map(
        ...     step, mesh=mesh, in_specs=(P(), P(("dc", "data"))), out_specs=P()
        ... )
        >>> jax.jit(program)(jnp.ones(1), jnp.arange(8.0)).tolist()  # 1 - 0.5 * mean of 0 to 7
        [-0.75]
    """
    keep_errors = wire is not None and wire.needs_error_feedback

    def init(parameters: Any) -> SyncAcrossSitesState:
        if not keep_errors:
            return SyncAcrossSitesState(None)
        axes = SiteAxes.resolve(intra, inter)

        def zeros(leaf: Any) -> jax.Array:
            return to_varying(jnp.zeros((1, *jnp.shape(leaf)), jnp.result_type(leaf)), axes.inter)

        return SyncAcrossSitesState(jax.tree.map(zeros, parameters))

    def update(
        updates: Any, state: SyncAcrossSitesState, parameters: Any = None
    ) -> tuple[Any, SyncAcrossSitesState]:
        axes = SiteAxes.resolve(intra, inter)
        _refuse_summed(updates, axes)
        options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "wire": wire}
        if keep_errors:
            errors = jax.tree.map(
                lambda error, own: error[0].astype(own.dtype), state.error_feedback, updates
            )
            sums, errors = all_reduce(updates, intra, inter, error_feedback=errors, **options)
            kept = jax.tree.map(
                lambda new, old: to_varying(new[None].astype(old.dtype), axes.inter),
                errors,
                state.error_feedback,
            )
            state = SyncAcrossSitesState(kept)
        else:
            sums = all_reduce(updates, intra, inter, **options)
        if mean:
            ranks = lax.axis_size((*axes.intra, *axes.inter))
            sums = jax.tree.map(lambda total: total / ranks, sums)
        return sums, state

    return optax.GradientTransformation(init, update)


def _refuse_summed(updates: Any, axes: SiteAxes) -> None:
    """Refuse gradients that `jax.grad` has summed over ranks, which would be summed once more."""
    for axis in (*axes.intra, *axes.inter):
        if not varying_axes(lax.axis_index(axis)):
            return  # under check_vma=False no type tells
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
            if axis not in varying_axes(leaf):
                name = jax.tree_util.keystr(path)
                raise UserError(
                    f"sync_across_sites: update{name} is the same along '{axis}', over which "
                    "jax.grad has summed it; before jax.grad, give every rank weights of its own: "
                    f"jax.lax.pcast(weights, {(*axes.intra, *axes.inter)}, to='varying')"
                )
