"""The collectives of a traced program: the bytes that a step asks to be sent, before any compiler.

`program_traffic` walks the equations of a `jax.jit(f).trace(...)`: into calls, `shard_map`, `remat`
and derivatives' own programs. It lists what `geojax.hlo.collective_traffic` would read from the
lowered program, by the same convention, and no device is touched. What nothing reads sends nothing.

    scan    its collectives count as often as it runs
    while   likewise if the caller knows the longest loop; otherwise once, marked as a least number
    cond    over each set of axes the collectives of the branch that sends most count: an upper
            bound, marked as conditional

What compilers change afterwards: see `geojax.hlo.traffic`.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, Mesh

from geojax.hlo import Collective, Traffic
from geojax.hlo.traffic import most_of

_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
_LOCAL = frozenset(("agreed", "axis_index", "pcast", "preduced", "pvary", "vary_unreduced_cast"))
"""Primitives that name axes of the mesh and send nothing."""
_AXES = ("axes", "axis_name")
"""Parameters that name the axes of a collective."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of equations in a program: their scopes, loops and branches."""

    around: tuple[str, ...] = ()
    executions: int = 1
    in_loop: bool = False
    at_least: bool = False
    conditional: bool = False


def program_traffic(
    program: jax.stages.Traced, mesh: Mesh | AbstractMesh, *, longest_loop: int | None = None
) -> Traffic:
    """List the collectives of `program`, by the axes of `mesh`, the mesh that it is meant for.

    A collective is named by its scopes and its primitive: "forward_layers/scan/psum".

    Args:
        program: what `jax.jit(f).trace(...)` returns.
        mesh: its axes and their sizes.
        longest_loop: iterations to count for a loop whose length is data of the run, such as the
            layers of a stage. None: one, and its collectives are marked `at_least`.
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    jaxpr = _jaxpr_of(program.jaxpr)
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = _CollectiveWalk(sizes, longest_loop).collectives(used, _Place())
    return Traffic(tuple(sizes.items()), tuple(found))


class _CollectiveWalk:
    def __init__(self, sizes: dict[str, int], longest_loop: int | None):
        self._sizes, self._longest_loop = sizes, longest_loop

    def collectives(self, jaxpr: Any, place: _Place) -> Iterator[Collective]:
        for equation in jaxpr.eqns:
            yield from self._of_equation(equation, place)

    def _of_equation(self, equation: Any, place: _Place) -> Iterator[Collective]:
        name = equation.primitive.name
        own = re.split("[/()]", str(equation.source_info.name_stack))
        scopes = (*place.around, *(scope for scope in own if scope), name)
        inside = dataclasses.replace(place, around=scopes)
        axes = self._axes(equation)
        if name in _KINDS:
            for crossed, ranks, senders in self._crossed(equation, axes):
                yield Collective(
                    name="/".join(scopes),
                    kind=_KINDS[name],
                    axes=crossed,
                    ranks=ranks,
                    senders=senders,
                    payload_bytes=sum(map(_bytes, equation.invars)),
                    executions=place.executions,
                    in_loop=place.in_loop,
                    at_least=place.at_least,
                    conditional=place.conditional,
                    scopes=scopes,
                )
            return
        assert not axes or name in _LOCAL, f"{name} over {axes}: a collective that is not counted"
        if name == "scan":
            times = equation.params["length"]
            inside = dataclasses.replace(
                inside, executions=place.executions * times, in_loop=place.in_loop or times > 1
            )
        elif name == "while":
            inside = dataclasses.replace(
                inside,
                executions=place.executions * (self._longest_loop or 1),
                in_loop=True,
                at_least=place.at_least or self._longest_loop is None,
            )
        elif name == "cond":
            inside = dataclasses.replace(inside, conditional=True)
            of_branches = [
                list(self.collectives(_jaxpr_of(branch), inside))
                for branch in equation.params["branches"]
            ]
            # Of those that send as much, the one that is chosen if the predicate is true.
            yield from most_of(of_branches[::-1])
            return
        for called in jaxprs_in_params(equation.params):
            yield from self.collectives(_jaxpr_of(called), inside)

    def _axes(self, equation: Any) -> tuple[str, ...]:
        """Return the axes of the mesh, longer than 1, that an equation's parameters name."""
        named: set[Any] = set()
        for parameter in _AXES:
            value = equation.params.get(parameter, ())
            named.update(value if isinstance(value, (tuple, list, set, frozenset)) else (value,))
        return tuple(axis for axis, size in self._sizes.items() if axis in named and size > 1)

    def _crossed(
        self, equation: Any, axes: tuple[str, ...]
    ) -> Iterable[tuple[tuple[str, ...], int, int]]:
        """Return the sets of axes that a collective crosses, the size of its groups, senders."""
        if not axes:
            return []
        devices = math.prod(self._sizes.values())
        groups = equation.params.get("axis_index_groups")
        assert groups is None, f"{equation.primitive.name} in groups of an axis is not counted"
        if equation.primitive.name == "ppermute":
            names = equation.params["axis_name"]
            names = names if isinstance(names, tuple) else (names,)
            shape = [self._sizes[name] for name in names]
            others = devices // math.prod(shape)
            pairs = np.array(equation.params["perm"])  # [pairs, source and target]
            places = np.stack(np.unravel_index(pairs, shape))  # [names, pairs, source and target]
            differs = zip(names, places[..., 0] != places[..., 1], strict=True)
            by_name = dict(differs)
            senders = collections.Counter(
                tuple(axis for axis in axes if by_name[axis][pair]) for pair in range(len(pairs))
            )
            return [(each, 2, others * senders[each]) for each in sorted(senders) if each]
        return [(axes, math.prod(self._sizes[axis] for axis in axes), devices)]


def _jaxpr_of(jaxpr: Any) -> Any:
    """Return the equations' own part of a jaxpr, which may be closed."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _bytes(variable: Any) -> int:
    shape: tuple[int, ...] = variable.aval.shape
    itemsize: int = variable.aval.dtype.itemsize
    return math.prod(shape) * itemsize
