"""Reading a state from the parts of a save, onto the devices of any layout.

A device's shard is read from what its site sees, its own part first. Where the role of the sites,
their number or the placement of layers has changed, a site may lack what it needs. Then those sites
that see it read it, and one sum over `dc` brings it: each element is read by one site, the others
add zeros. Onto the same layout nothing is sent.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.checkpoint.reading.choice import SavedPart, saved_arrays
from geojax.checkpoint.saved_array import (
    ArrayPiece,
    Indices,
    Reads,
    SavedArray,
    indices_of_site,
    open_array,
    split_into_boxes,
    start_reading,
)
from geojax.checkpoint.site_group import SiteGroup
from geojax.named_arrays import is_expendable
from geojax.sharding.leaf_layouts import PADDING, LeafLayout


class Crossing(NamedTuple):
    """Bytes of a restore that one site, the one with most of them, has from another."""

    link: int
    """Sent over the link, because a site does not see all that it needs."""
    files: int
    """Read from files that another site wrote, on a file system that both see."""


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The parts of a save, as the sites of this run see them."""

    checkpoints: Path
    """Folder of the run's checkpoints."""
    content: Mapping[str, Any]
    """Manifest of any part; all say what each of them holds."""
    parts_of_site: Sequence[Sequence[SavedPart]]
    """Parts that each site sees."""
    groups: Sequence[SiteGroup]
    """Sites of this run."""

    @property
    def mesh(self) -> Mesh:
        """All sites of this run."""
        return self.groups[0].all_sites

    @functools.cached_property
    def _held(self) -> list[dict[str, SavedArray]]:
        """Arrays of each part of the save."""
        return [saved_arrays(self.content, part) for part in range(len(self.content["sites"]))]

    @functools.cached_property
    def _reader(self) -> dict[int, int]:
        """The site that reads each part, by number, if not every site can."""
        seen = reversed(list(enumerate(self.parts_of_site)))
        return {part.site: site for site, parts in seen for part in parts}

    def crossing(self, layouts: Mapping[str, LeafLayout]) -> Crossing:
        """Count what reading `layouts` brings from another site; nothing is read."""
        link, files = 0, [0 for _ in self.groups]
        sites = len(self.groups)
        for name, layout in layouts.items():
            if self._is_lacking_somewhere(name, layout):
                shard = math.prod(layout.shard_shape) * layout.dtype.itemsize
                on_devices = shard * self.mesh.devices.size // sites
                # A reduce-scatter, or an all-reduce, which is that and an all-gather.
                link += (
                    on_devices * (sites - 1)
                    if _is_cut(layout)
                    else (2 * on_devices * (sites - 1) // sites)
                )
            else:
                for site in range(sites):
                    files[site] += self._bytes_of_others(name, layout, site)
        return Crossing(link, max(files))

    def read(self, name: str, layout: LeafLayout) -> jax.Array:
        """Read a leaf of the state; all processes read all leaves in the same order.

        Of an expendable one what no site sees is zero.
        """
        if len(self.groups) > 1 and self._is_lacking_somewhere(name, layout):
            return self._sum_of_sites(name, layout)
        sharding = NamedSharding(self.mesh, layout.spec())
        indices = layout.model_indices()
        places = sharding.addressable_devices_indices_map(layout.padded_shape)
        pieces = [
            self._pieces(name, layout, self._own_first(site)) if group.is_here else []
            for site, group in enumerate(self.groups)
        ]
        reads: Reads = []
        read_once: dict[Any, np.ndarray] = {}
        shards = {}
        for device, place in places.items():
            assert place is not None, "a device holds a shard of every leaf"
            site = self._site_of[device]
            wanted = tuple(dim[at] for dim, at in zip(indices, place, strict=True))
            key = (site, *(dim.tobytes() for dim in wanted))
            if key not in read_once:
                read_once[key], left = _start_shard(layout, wanted, pieces[site], reads)
                assert not left or is_expendable(name), (
                    "every element must be in a part of the save"
                )
            shards[device] = read_once[key]
        for target, at, read in reads:
            target[at] = read.result()
        arrays = [jax.device_put(shard, device) for device, shard in shards.items()]
        return jax.make_array_from_single_device_arrays(layout.padded_shape, sharding, arrays)

    @functools.cached_property
    def _site_of(self) -> dict[jax.Device, int]:
        """The site of each device."""
        return {
            device: site
            for site, group in enumerate(self.groups)
            for device in group.mesh.devices.flat
        }

    def _own_first(self, site: int) -> list[SavedPart]:
        """Return the parts that a site sees, the one of a site of its name first."""
        name = self.groups[site].name
        return sorted(
            self.parts_of_site[site], key=lambda part: (part.sites[part.site] != name, part.site)
        )

    def _pieces(
        self, name: str, layout: LeafLayout, parts: Sequence[SavedPart], *, is_open: bool = True
    ) -> list[ArrayPiece]:
        """Return the arrays of a leaf in `parts`."""
        pieces = []
        for part in parts:
            if (array := self._held[part.site].get(name)) is not None:
                store = open_array(self.checkpoints / part.path, name) if is_open else None
                positions = array.positions(layout.shape)
                pieces.append(ArrayPiece(positions, store and store.result()))
        return pieces

    @property
    def unseen_sites(self) -> list[str]:
        """Names of the sites that wrote parts which no site of this run sees."""
        names = self.content["sites"]
        return [name for number, name in enumerate(names) if number not in self._reader]

    def first_lacking(self, layouts: Mapping[str, LeafLayout]) -> str | None:
        """Name the first leaf of which some site does not see all that it needs; None: none."""
        lacking = (name for name, each in layouts.items() if self._is_lacking_somewhere(name, each))
        return next(lacking, None)

    def _is_lacking_somewhere(self, name: str, layout: LeafLayout) -> bool:
        """Return whether some site does not see all that its devices need."""
        for site, parts in enumerate(self.parts_of_site):
            pieces = self._pieces(name, layout, parts, is_open=False)
            if split_into_boxes(self._needed(layout, site), pieces)[1]:
                return True
        return False

    def _bytes_of_others(self, name: str, layout: LeafLayout, site: int) -> int:
        """Count the bytes that a site reads from parts that are not its own."""
        own_first = self._own_first(site)
        pieces = self._pieces(name, layout, own_first, is_open=False)
        boxes, _ = split_into_boxes(self._needed(layout, site), pieces)
        own_name = self.groups[site].name
        has_own = bool(own_first) and own_first[0].sites[own_first[0].site] == own_name
        own = pieces[0] if has_own and name in self._held[own_first[0].site] else None
        return sum(
            math.prod(positions.size for positions in box.at) * layout.dtype.itemsize
            for box in boxes
            if box.piece is not own
        )

    def _needed(self, layout: LeafLayout, site: int) -> Indices:
        """Return what a site's devices need of the model's leaf."""
        group = self.groups[site]
        indices = indices_of_site(layout, self.mesh, group.site)
        if not layout.has_stage_dim:
            return indices
        held = indices[0] != PADDING
        return indices[1:] if held.any() else tuple(dim[:0] for dim in indices[1:])

    def _sum_of_sites(self, name: str, layout: LeafLayout) -> jax.Array:
        """Read a leaf of which each site sees a part, and send what the others lack."""
        mesh, cut = self.mesh, _is_cut(layout)
        sites = len(self.groups)
        places = NamedSharding(mesh, layout.spec()).devices_indices_map(layout.padded_shape)
        indices = layout.model_indices()
        pieces = [self._pieces_to_send(name, layout, site) for site in range(sites)]
        reads: Reads = []
        contributions = {}
        by_site = np.moveaxis(mesh.devices, mesh.axis_names.index("dc"), 0).reshape(sites, -1)
        for (site, rank), device in np.ndenumerate(by_site):
            if device.process_index != jax.process_index():
                continue
            shards = []
            for target in by_site[:, rank] if cut else [device]:
                wanted = tuple(dim[at] for dim, at in zip(indices, places[target], strict=True))
                shard, left = _start_shard(layout, wanted, pieces[site], reads)
                assert not left, "every element must be in a part of the save"
                shards.append(shard)
            contributions[device] = shards
        for target, at, read in reads:
            target[at] = read.result()
        bits = np.dtype(f"uint{8 * layout.dtype.itemsize}")
        arrays = [
            jax.device_put(np.stack(shards)[None].view(bits), device)
            for device, shards in contributions.items()
        ]
        inside = [tuple(a for a in axes if a != "dc") for axes in layout.padded_axes()]
        spec = PartitionSpec("dc", None, *(axes or None for axes in inside))
        shape = (sites, *_stacked_shape(layout, sites, cut))
        stacked = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), arrays)
        summed: jax.Array = _sum_over_sites(mesh, spec, layout.spec(), layout.dtype, cut)(stacked)
        return summed

    def _pieces_to_send(self, name: str, layout: LeafLayout, site: int) -> list[ArrayPiece]:
        """Return all arrays of a leaf in the save; those are open that `site` reads for all."""
        parts = {part.site: part for part in self.parts_of_site[site]}
        pieces = []
        for index, held in enumerate(self._held):
            if name not in held:
                continue
            store = None
            if self._reader.get(index) == site and self.groups[site].is_here:
                store = open_array(self.checkpoints / parts[index].path, name).result()
            pieces.append(ArrayPiece(held[name].positions(layout.shape), store))
        return pieces


def _start_shard(
    layout: LeafLayout, wanted: Indices, pieces: Sequence[ArrayPiece], reads: Reads
) -> tuple[np.ndarray, list[Indices]]:
    """Start to read a device's shard; what neither the model nor a piece has is zero.

    Returns:
        The shard, and the positions of what no piece has.
    """
    shard = np.zeros([dim.size for dim in wanted], layout.dtype)
    target = shard
    if layout.has_stage_dim:
        if wanted[0][0] == PADDING:
            return shard, []
        target, wanted = shard[0, ...], wanted[1:]
    boxes, left = split_into_boxes(wanted, pieces)
    reads += start_reading(target, boxes)
    return shard, left


def _is_cut(layout: LeafLayout) -> bool:
    """Return whether sites hold different elements of a leaf."""
    return any("dc" in axes for axes in layout.padded_axes())


def _stacked_shape(layout: LeafLayout, sites: int, cut: bool) -> tuple[int, ...]:
    """Return the shape of what each site adds: to all sites, or to each of them."""
    shape = zip(layout.padded_shape, layout.padded_axes(), strict=True)
    local = tuple(size // sites if "dc" in axes else size for size, axes in shape)
    return (sites if cut else 1, *local)


@functools.cache
def _sum_over_sites(
    mesh: Mesh, spec: PartitionSpec, out_spec: PartitionSpec, dtype: Any, cut: bool
) -> Any:
    """Compile the sum of what the sites read, as bits: a sum of numbers would lose -0.0."""

    def add(stacked: jax.Array) -> jax.Array:
        bits = lax.psum_scatter(stacked[0], "dc") if cut else lax.psum(stacked[0, 0], "dc")
        return lax.bitcast_convert_type(bits, jnp.dtype(dtype))

    return jax.jit(jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=out_spec))
