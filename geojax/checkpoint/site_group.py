"""The processes and devices that write one folder of checkpoints together.

With `per_site` that is a site: its processes share a file system, and sites need not. An array of a
group is made of the pieces that its devices hold, without moving them:

    the state on two sites      weights [12, 8] over (dc, stage)     of each site [6, 8] over stage
                                weights [12, 8] on both              of each site [12, 8]

The one exception is a leaf that only some stages hold (a table, the head): on the devices every
stage has room for it, and a checkpoint should not. The first stage of the group that holds it sends
it to the group's others, which then share the writing.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.checkpoint.saved_array import indices_of_site
from geojax.sharding.leaf_layouts import PADDING, LeafLayout


@dataclasses.dataclass(frozen=True)
class SiteGroup:
    """Devices whose part of the training state lies in one folder."""

    name: str
    """Name of the site; empty where all sites save together."""

    site: int | None
    """Index of the site along `dc`; None where all sites save together."""

    mesh: Mesh
    """All axes, with `dc` of size 1 where this is a site."""

    all_sites: Mesh
    """The mesh of the run."""

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that drive the devices, ascending; the first one is the primary."""
        return tuple(sorted({device.process_index for device in self.mesh.devices.flat}))

    @property
    def primary(self) -> int:
        """The process that makes folders and commits checkpoints."""
        return self.processes[0]

    @property
    def is_here(self) -> bool:
        """True if this process belongs to the group."""
        return jax.process_index() in self.processes

    @property
    def is_primary_here(self) -> bool:
        """True if this process is the group's primary."""
        return jax.process_index() == self.primary

    def folder(self, checkpoints: Path) -> Path:
        """Return the group's folder below that of the run's checkpoints."""
        return checkpoints / _file_name(self.name) if self.name else checkpoints

    def array(self, leaf: jax.Array, layout: LeafLayout) -> jax.Array | None:
        """Return what the group holds of a leaf of the state; None where it holds nothing."""
        indices = indices_of_site(layout, self.all_sites, self.site)
        spec, held = layout.spec(), leaf
        if self.site is not None:
            here = set(self.mesh.devices.flat)
            shards = [shard.data for shard in leaf.addressable_shards if shard.device in here]
            shape = tuple(len(dim) for dim in indices)
            held = jax.make_array_from_single_device_arrays(
                shape, NamedSharding(self.mesh, spec), shards
            )
        if layout.stages is not None and not layout.stages.stacked:
            holders = np.flatnonzero(indices[0] != PADDING)
            if holders.size == 0:
                return None
            held = select_stage(self.mesh, spec, layout.stages.axes, int(holders[0]))(held)
        return held


def site_groups(
    mesh: Mesh, names: Sequence[str] | None, island: str | None = None
) -> tuple[SiteGroup, ...]:
    """Divide a mesh into one group for each site, called `names`; None: into one for all.

    `island` is the name of the one site that the mesh is of, where the others have runtimes of
    their own.
    """
    if island is not None:
        return (SiteGroup(island, None, mesh, mesh),)
    if names is None or mesh.shape.get("dc", 1) == 1:
        return (SiteGroup("", None, mesh, mesh),)
    dim = mesh.axis_names.index("dc")
    assert len(names) == mesh.shape["dc"], f"{len(names)} names for {mesh.shape['dc']} sites"

    def of_site(site: int) -> Mesh:
        devices = np.take(mesh.devices, [site], axis=dim)
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)

    return tuple(SiteGroup(name, site, of_site(site), mesh) for site, name in enumerate(names))


@functools.cache
def select_stage(mesh: Mesh, spec: PartitionSpec, axes: tuple[str, ...], stage: int) -> Any:
    """Compile the function that brings a leaf [stages, ...] of `stage` to all stages of a mesh.

    The bits travel as integers, since a sum with zeros would lose the sign of a zero.
    """

    def select(leaf: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(leaf[0], jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
        own = jnp.where(lax.axis_index(axes) == stage, bits, 0)
        return lax.bitcast_convert_type(lax.psum(own, axes), leaf.dtype)

    whole = PartitionSpec(*spec[1:])
    return jax.jit(jax.shard_map(select, mesh=mesh, in_specs=spec, out_specs=whole))


def _file_name(site: str) -> str:
    """Return a name of a folder for a site: no path, and no number, which would be a step."""
    quoted = quote(site, safe=" ").replace(".", "%2E")
    return f"%{ord(quoted[0]):02X}{quoted[1:]}" if quoted.isdecimal() else quoted
