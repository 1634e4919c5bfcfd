"""Replica groups: the devices that talk to each other in a collective, in their printed forms.

{{0,1},{2,3}}                                     listed
[2,4]<=[8]     [4,2]<=[2,4]T(1,0)                 iota: 8 ids, reshaped, transposed, reshaped
mesh['dc'=2,'data'=4] {'data'}                    all ids that differ only along these axes
mesh['a'=8], device_ids=([3,..]) {'a':(2)4}       with the ids' order, and part of an axis:
                                                  a of size 8 = 2 x 4, of which the 4
mesh['a'=8], device_ids=([4,2]T(1,0)) {'a'}       the ids' order as an iota, transposed
"""

import itertools
import re

import numpy as np

from geojax.hlo.module import HloParseError

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\]"
    r"(?:\s*,\s*device_ids=\((?P<ids>[\[\]\d,\s]*(?:T\([\d,\s]*\))?)\))?"
    r"\s*\{(?P<over>.*)\}$"
)
_SIZED_AXIS = re.compile(r"'?([^'=,\s]+)'?=(\d+)")
_AXIS_REFERENCE = re.compile(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?'?")

Groups = list[list[int]]


def parse_groups(printed: str, devices: int) -> Groups:
    """Return the groups of device numbers that `printed` stands for.

    `{}` is one group of all `devices`.

    Raises:
        HloParseError: the form is none of the known ones.
    """
    printed = printed.strip()
    if printed == "{}":
        return [list(range(devices))]
    if printed.startswith("{{"):
        return parse_id_lists(printed)
    iota = _IOTA.match(printed)
    if iota:
        shape, source = _ints(iota[1]), _ints(iota[2])
        ids = np.arange(np.prod(source)).reshape(source)
        if iota[3]:
            ids = ids.transpose(_ints(iota[3]))
        groups: Groups = ids.reshape(shape).tolist()
        return groups
    over_mesh = _MESH.match(printed)
    if over_mesh:
        return _mesh_groups(over_mesh["axes"], over_mesh["ids"], over_mesh["over"])
    raise HloParseError(f"HLO text: replica groups of an unknown form: {printed[:80]!r}")


def parse_id_lists(printed: str) -> Groups:
    """Read `{{0,1},{2,3}}` as [[0, 1], [2, 3]]; source-target pairs are printed so too."""
    return [_ints(group) for group in re.findall(r"\{([\d,\s]+)\}", printed)]


def _mesh_groups(axes: str, device_ids: str | None, over: str) -> Groups:
    sizes = {name: int(size) for name, size in _SIZED_AXIS.findall(axes)}
    count = int(np.prod(list(sizes.values())))
    ids = np.arange(count)
    if device_ids is not None:
        listed, _, order = device_ids.partition("T")
        listed_ids = np.array(_ints(listed))
        ids = ids.reshape(listed_ids).transpose(_ints(order)) if order else listed_ids
    # Every axis is cut into (before, part, after), of which a reference takes the part; references
    # to two parts of one axis cut it at all their bounds.
    references = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in _AXIS_REFERENCE.findall(over)
    ]
    pieces: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        bounds = {1, size}
        for _, before, part in (r for r in references if r[0] == name):
            bounds |= {before, before * part}
        ordered = sorted(bounds)
        pieces += [(name, low, high // low) for low, high in itertools.pairwise(ordered)]
    inside = [
        index
        for name, before, part in references
        for index, (piece, low, size) in enumerate(pieces)
        if piece == name and before <= low and low * size <= before * part
    ]
    outside = [index for index in range(len(pieces)) if index not in inside]
    grid = ids.reshape([size for _, _, size in pieces]).transpose(outside + inside)
    members = int(np.prod([pieces[index][2] for index in inside]))
    groups: Groups = grid.reshape(count // members, members).tolist()
    return groups


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
