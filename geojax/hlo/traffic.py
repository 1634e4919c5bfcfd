"""The collectives of a compiled program: the mesh axes that they cross and what they send.

`collective_traffic` reads the program's HLO after all passes of the compiler, so that a collective
which the compiler added shows as well. Bytes are counted per device and per run of the program, by
the convention of `geojax.hlo.conventions`.

    axes    a collective belongs to the set of mesh axes along which the members of its groups
            differ. A flat all-reduce over dc and data is listed under "dc,data", not under either.
            A permute whose pairs cross different axes is listed once for each set.
    loops   a collective in a while loop counts as often as the loop runs; as often as one iteration
            has it, marked as a least number, where that is data of the run.
    cond    over each set of axes the collectives of the branch of a conditional that sends most
            count: an upper bound, marked as conditional.

What compilers change (seen with JAX 0.10 and 0.12). XLA for CPUs sums and moves 16-bit floats as
float32 (its passes all-reduce-promotion and float-normalization-bf16), so a bfloat16 wire shows
twice its bytes there; GPUs send what is written. CPU and GPU compilers merge independent
all-reduces into one of several operands. The count falls and the bytes stay
(`--xla_disable_hlo_passes=cpu-all-reduce-combiner` and
`--xla_gpu_all_reduce_combine_threshold_bytes=0` keep them apart). Equal collectives of equal values
become one (algsimp, cse). What a loop sends alike in each iteration leaves it
(while-loop-invariant-code-motion). To see what a shard_map program asks for, before any compiler,
give `jax.jit(f).lower()` itself instead of the compiled program.
"""

import collections
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from geojax.errors import UserError
from geojax.hlo.conventions import BYTES_SENT
from geojax.hlo.module import Computation, HloParseError, Instruction, Module, parse_module
from geojax.hlo.replica_groups import parse_groups, parse_id_lists
from geojax.hlo.trip_count import trip_count

_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_SENT_PAIRS = re.compile(r"_xla_send_recv_source_target_pairs=\"?(\{\{[^\"=]*?\}\})")


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a program."""

    name: str
    """The instruction's name, as in the HLO text."""
    kind: str
    """The HLO opcode without "-start", such as "all-reduce"."""
    axes: tuple[str, ...]
    """The mesh axes that it crosses, in the mesh's order; none where groups hold one device."""
    ranks: int
    """The devices of a group; 2 for a permute that sends anything."""
    senders: int
    """Number of devices that send: all, but for a permute those with a target over these axes."""
    payload_bytes: int
    """The bytes that one device puts in, each time."""
    executions: int
    """Number of times that it runs in one run of the program."""
    in_loop: bool
    """True if it is in the body or the condition of a while loop."""
    at_least: bool
    """True if one of these loops runs as often as data of the run say; one iteration is counted."""
    conditional: bool
    """True if it is in a branch of a conditional, so that it may run less often."""
    scopes: tuple[str, ...] = ()
    """The scopes that it was traced in, the outermost first; empty where the program has none."""
    share: Fraction = Fraction(1)
    """Part of `executions` that a device runs, where a caller knows how often branches run."""

    @property
    def bytes_sent(self) -> Fraction:
        """The bytes that one device sends in one run of the program."""
        sent = BYTES_SENT[self.kind](self.payload_bytes, self.ranks)
        return self.share * self.executions * sent


@dataclass(frozen=True)
class Sum:
    """Several collectives of one kind over the same axes."""

    instructions: int
    count: int
    """Number of collectives in one run of the program."""
    in_loop: int
    """Number of the instructions that are in loops."""
    bytes_sent: Fraction
    """The bytes that one device sends in one run of the program."""
    at_least: int
    """Number of the instructions in loops of unknown length, of which one iteration is counted."""


@dataclass(frozen=True)
class Traffic:
    """The collectives of one program. `str()` is a table, `to_json()` what golden files hold."""

    mesh: tuple[tuple[str, int], ...]
    """The mesh's axes and their sizes."""
    collectives: tuple[Collective, ...]

    @property
    def by_axes(self) -> dict[tuple[str, ...], Fraction]:
        """The bytes that one device sends, by the axes that they cross; of hops, a sender's."""
        totals = {
            axes: sum((total.bytes_sent for total in kinds.values()), Fraction(0))
            for axes, kinds in self.sums().items()
        }
        return {axes: sent for axes, sent in totals.items() if sent}

    def over(self, axis: str) -> tuple[Collective, ...]:
        """Return the collectives that cross `axis`, alone or together with others.

        Raises:
            UserError: the mesh has no such axis.
        """
        names = [name for name, _ in self.mesh]
        if axis not in names:
            raise UserError(f"collective traffic: no axis '{axis}'; the mesh has {names}")
        return tuple(collective for collective in self.collectives if axis in collective.axes)

    def bytes_over(self, axis: str) -> Fraction:
        """Sum the bytes that a device sends in the collectives that cross `axis`."""
        return sum((collective.bytes_sent for collective in self.over(axis)), Fraction(0))

    def total_bytes_over(self, axis: str) -> Fraction:
        """Sum the bytes that all devices together send in the collectives that cross `axis`."""
        return sum((each.bytes_sent * each.senders for each in self.over(axis)), Fraction(0))

    def sums(self) -> dict[tuple[str, ...], dict[str, Sum]]:
        """Sum the collectives by axes, then by kind, both sorted."""
        order = {name: position for position, (name, _) in enumerate(self.mesh)}

        def key(collective: Collective) -> tuple[tuple[int, ...], str]:
            return tuple(order[axis] for axis in collective.axes), collective.kind

        result: dict[tuple[str, ...], dict[str, Sum]] = {}
        for _, group in itertools.groupby(sorted(self.collectives, key=key), key=key):
            alike = list(group)
            result.setdefault(alike[0].axes, {})[alike[0].kind] = Sum(
                instructions=len(alike),
                count=sum(collective.executions for collective in alike),
                in_loop=sum(collective.in_loop for collective in alike),
                bytes_sent=sum((collective.bytes_sent for collective in alike), Fraction(0)),
                at_least=sum(collective.at_least for collective in alike),
            )
        return result

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dicts, strings and numbers; whole bytes are integers."""
        return {
            "mesh": dict(self.mesh),
            "axes": [
                {
                    "axes": list(axes),
                    "kinds": {
                        kind: {
                            "instructions": total.instructions,
                            "count": total.count,
                            "in_loop": total.in_loop,
                            "bytes_sent": _number(total.bytes_sent),
                        }
                        | ({"at_least": total.at_least} if total.at_least else {})
                        for kind, total in kinds.items()
                    },
                }
                for axes, kinds in self.sums().items()
            ],
        }

    def __str__(self) -> str:
        header = ("axes", "collective", "count", "in loops", "bytes sent by a device")
        rows = [
            (
                ",".join(axes) or "(none)",
                kind,
                f"{_at_least(total)}{total.count}",
                f"{total.in_loop} of {total.instructions}",
                f"{_at_least(total)}{_number(total.bytes_sent):,}",
            )
            for axes, kinds in self.sums().items()
            for kind, total in kinds.items()
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (header, *rows)
        )


def collective_traffic(
    program: jax.stages.Compiled | jax.stages.Lowered | str,
    mesh: Mesh | AbstractMesh,
    *,
    longest_loop: int | None = None,
) -> Traffic:
    """List the collectives of `program`, by the axes of `mesh`, the mesh that it runs on.

    Args:
        program: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`. A `Lowered`
            (without `.compile()`) shows what a shard_map program asks for; collectives that the
            compiler would insert for automatic sharding are not in it yet.
        mesh: its devices in order are the program's partitions 0, 1, ...
        longest_loop: iterations to count for a loop whose length is data of the run, such as the
            layers of a stage. None: one, and its collectives are marked `at_least`.

    Raises:
        UserError: the program was compiled for another number of devices.
        HloParseError: the text is no HLO module or of an unknown form.

    Examples:
        A gradient of 1 MB is summed over two sites of four devices each: inside the sites first,
        so that only a quarter of it crosses between them.

        >>> import geojax, jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = geojax.make_mesh(dc=2, data=4)
        >>> def sum_over_sites(gradient):
        ...     shard = jax.lax.psum_scatter(gradient, "data", tiled=True)
        ...     return jax.lax.psum(shard, "dc")
        >>> specs = dict(in_specs=P(), out_specs=P("data"), check_vma=False)
        >>> step = jax.jit(jax.shard_map(sum_over_sites, mesh=mesh, **specs))
        >>> traffic = collective_traffic(step.lower(jnp.ones(2**18)).compile(), mesh)
        >>> print(traffic)
        axes  collective      count  in loops  bytes sent by a device
        dc    all-reduce          1    0 of 1                 262,144
        data  reduce-scatter      1    0 of 1                 786,432
        >>> int(traffic.bytes_over("dc"))
        262144
    """
    text = program_text(program)
    try:
        return _read_traffic(text, mesh, longest_loop)
    except (HloParseError, UserError):
        raise
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise HloParseError(f"HLO text: unknown form, {error!r}") from error


def _read_traffic(text: str, mesh: Mesh | AbstractMesh, longest_loop: int | None) -> Traffic:
    module = parse_module(text)
    sizes = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    if module.partitions not in (None, mesh.size):
        raise UserError(
            f"collective traffic: the program was compiled for {module.partitions} devices and "
            f"the mesh has {mesh.size}; give the mesh that it was compiled for"
        )
    reader = _Reader(module, tuple(mesh.axis_names), tuple(mesh.axis_sizes), longest_loop)
    entry = module.computations[module.entry]
    found = reader.read(entry, 1, in_loop=False, at_least=False, conditional=False)
    return Traffic(sizes, tuple(found))


def most_of(branches: Sequence[Sequence[Collective]]) -> Iterator[Collective]:
    """Yield over each set of axes what the branch sends that sends most; of equals the first.

    Args:
        branches: the collectives of each branch of a conditional.
    """
    for axes in dict.fromkeys(each.axes for own in branches for each in own):
        over_axes = ([each for each in own if each.axes == axes] for own in branches)
        yield from max(over_axes, key=lambda own: sum(each.bytes_sent for each in own))


class _Reader:
    """A walk through a module from its entry, the way it runs."""

    def __init__(
        self,
        module: Module,
        axes: tuple[str, ...],
        sizes: tuple[int, ...],
        longest_loop: int | None,
    ) -> None:
        self._module = module
        self._longest_loop = longest_loop
        self._axes = axes
        self._devices = int(np.prod(sizes))
        # [axes, devices]: the position of every device along every axis
        self._positions = np.array(np.unravel_index(np.arange(self._devices), sizes))
        self._holds = functools.cache(self._holds_collectives)

    def read(
        self,
        computation: Computation,
        executions: int,
        *,
        in_loop: bool,
        at_least: bool,
        conditional: bool,
    ) -> Iterator[Collective]:
        for instruction in computation:
            kind = _kind(instruction)
            if kind is not None:
                payload = computation.operand_bytes(instruction)
                for axes, ranks, senders in self._crossed(kind, instruction):
                    yield Collective(
                        instruction.name,
                        kind,
                        axes,
                        ranks,
                        senders,
                        payload,
                        executions,
                        in_loop,
                        at_least,
                        conditional,
                        _scopes(instruction),
                    )
                continue
            if instruction.opcode.endswith(("-done", "-update")):
                continue  # names the computation that its -start has named
            called = [name for name in instruction.calls if self._holds(name)]
            if not called:
                continue
            loop = instruction.opcode == "while"
            times: int | None = 1
            if loop:
                times = trip_count(self._module, computation, instruction)
                times = self._longest_loop if times is None else times
            branches = instruction.opcode == "conditional"
            found = [
                list(
                    self.read(
                        self._module.computations[name],
                        executions * (1 if times is None else times),
                        in_loop=in_loop or loop,
                        at_least=at_least or times is None,
                        conditional=conditional or branches,
                    )
                )
                for name in called
            ]
            yield from most_of(found) if branches else itertools.chain.from_iterable(found)

    def _holds_collectives(self, name: str) -> bool:
        computation = self._module.computations.get(name)
        return computation is not None and any(
            _kind(instruction) is not None or any(map(self._holds, instruction.calls))
            for instruction in computation
        )

    def _crossed(
        self, kind: str, instruction: Instruction
    ) -> list[tuple[tuple[str, ...], int, int]]:
        """Return the sets of axes that the collective crosses, the size of its groups, senders."""
        if kind == "collective-permute":
            pairs = parse_id_lists(_source_target_pairs(instruction))
            senders = collections.Counter(self._differing([pair]) for pair in pairs)
            crossed = sorted(axes for axes in senders if axes)
            return [(axes, 2, senders[axes]) for axes in crossed] or [((), 1, 0)]
        groups = parse_groups(_printed_groups(instruction), self._devices)
        return [(self._differing(groups), max(map(len, groups)), sum(map(len, groups)))]

    def _differing(self, groups: list[list[int]]) -> tuple[str, ...]:
        members = np.array(groups) if len({len(group) for group in groups}) == 1 else None
        if members is None:
            found = [self._differing([group]) for group in groups]
            return tuple(axis for axis in self._axes if any(axis in axes for axes in found))
        if members.max() >= self._devices:
            raise HloParseError(
                f"HLO text: the program names device {members.max()}, and the mesh has "
                f"{self._devices}; give the mesh that it was compiled for"
            )
        positions = self._positions[:, members]  # [axes, groups, members]
        differs = (positions != positions[:, :, :1]).any(axis=(1, 2))
        return tuple(axis for axis, different in zip(self._axes, differs, strict=True) if different)


def program_text(program: jax.stages.Compiled | jax.stages.Lowered | str) -> str:
    """Return the HLO text of `program`.

    Raises:
        HloParseError: the backend does not print its compiled programs.
    """
    if isinstance(program, str):
        return program
    if isinstance(program, jax.stages.Lowered):
        return program.as_text(dialect="hlo")
    text = program.as_text()
    if text is None:
        raise HloParseError("HLO text: this backend does not print its compiled programs")
    return text


def _kind(instruction: Instruction) -> str | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in BYTES_SENT:
        return opcode
    # A GPU compiler may cut a permute into sends and receives; the send stands for both.
    if opcode == "send" and _SENT_PAIRS.search(instruction.tail):
        return "collective-permute"
    return None


def _scopes(instruction: Instruction) -> tuple[str, ...]:
    found = _OP_NAME.search(instruction.tail)
    return tuple(found[1].split("/")) if found else ()


def _printed_groups(instruction: Instruction) -> str:
    attributes = instruction.attributes
    printed = attributes.get("replica_groups", "{}")
    if printed.startswith("mesh") and "device_ids" in attributes:
        printed = f"{printed}, device_ids={attributes['device_ids']}"
    return printed


def _source_target_pairs(instruction: Instruction) -> str:
    sent = _SENT_PAIRS.search(instruction.tail)
    return sent[1] if sent else instruction.attributes["source_target_pairs"]


def _at_least(total: Sum) -> str:
    return ">=" if total.at_least else ""


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
