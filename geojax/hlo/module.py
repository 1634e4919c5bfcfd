"""A reader for the text of an HLO module: computations, instructions, shapes, calls.

It reads only what its neighbors need, and nothing of what an instruction computes. It takes the
text of compiled programs (names with `%`, shapes in the computation's header) and of lowered ones
(neither); attributes are parsed only for the instructions that are asked for.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_PARTITIONS = re.compile(r"^HloModule .*\bnum_partitions=(\d+)", re.MULTILINE)
_REPLICAS = re.compile(r"^HloModule .*\breplica_count=(\d+)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[^\s(={]+) ?(?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[^\s=]+) = (?P<rest>.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<= ]*)\]")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|called_computations|branch_computations|true_computation"
    r"|false_computation)=(?:\{([^}]*)\}|(%?[^\s,}]+))"
)


class HloParseError(ValueError):
    """HLO text of a form that this reader does not know: another version of XLA, another backend.

    Nothing that a run computes depends on that text, so a run notes the error and goes on.
    """


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    """The result's shape as printed: `f32[8]{0}`, or a tuple of such."""
    opcode: str
    tail: str
    """The text after the opcode: the operands in parentheses and the attributes."""

    @functools.cached_property
    def _operands_and_attributes(self) -> tuple[tuple[str, ...], dict[str, str]]:
        end = _closing(self.tail, 0)
        operands = tuple(
            part.split()[-1].lstrip("%") for part in _split(self.tail[1:end]) if part.strip()
        )
        attributes: dict[str, str] = {}
        for part in _split(self.tail[end + 1 :]):
            key, _, value = part.strip().partition("=")
            if key:
                attributes[key] = value
        return operands, attributes

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands' names; of a `constant` or `parameter` what stands in the parentheses."""
        return self._operands_and_attributes[0]

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes by name, as printed."""
        return self._operands_and_attributes[1]

    @property
    def calls(self) -> tuple[str, ...]:
        """The computations that the instruction names, for any purpose."""
        lists = (found[1] or found[2] for found in _CALLS.finditer(self.tail))
        return tuple(name.strip().lstrip("%") for names in lists for name in names.split(","))


@dataclass(frozen=True)
class Computation:
    """A named list of instructions; `root` names the one that is its result."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operand_bytes(self, instruction: Instruction) -> int:
        """Count the bytes of all operands of `instruction`, which is one of this computation."""
        return sum(shape_bytes(self.instructions[name].shape) for name in instruction.operands)


@dataclass(frozen=True)
class Module:
    """A parsed program."""

    computations: dict[str, Computation]
    entry: str
    partitions: int | None
    """The number of devices the program is partitioned over; None where the text does not say."""


def parse_module(text: str) -> Module:
    """Parse the text of an HLO module.

    Raises:
        HloParseError: the text is not that of an HLO module, or the program has replicas.
    """
    computations: dict[str, Computation] = {}
    entry = None
    name, root, instructions = "", "", dict[str, Instruction]()
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name, root, instructions = header["name"], "", {}
            if header["entry"]:
                entry = name
        elif line.startswith("}") and name:
            computations[name] = Computation(name, instructions, root)
            name = ""
        elif name:
            found = _INSTRUCTION.match(line)
            if found:
                instruction = _instruction(found["name"], found["rest"])
                instructions[instruction.name] = instruction
                if found["root"]:
                    root = instruction.name
    if entry is None or entry not in computations:
        raise HloParseError(
            "HLO text: this is not an HLO module (no ENTRY computation); "
            "give what jax.jit(f).lower(...).compile() returns, or its as_text()"
        )
    partitions = _PARTITIONS.search(text)
    replicas = _REPLICAS.search(text)
    if replicas and int(replicas[1]) > 1:
        raise HloParseError(
            f"HLO text: the program has {replicas[1]} replicas (jax.pmap); only "
            "partitioned programs (jax.jit, jax.shard_map) lie on a mesh"
        )
    return Module(computations, entry, int(partitions[1]) if partitions else None)


def shape_bytes(shape: str) -> int:
    """Count the bytes of an array shape such as `bf16[4,8]{1,0}`, or of all arrays of a tuple."""
    return sum(
        -(-_bits(dtype) * math.prod(_sizes(sizes)) // 8) for dtype, sizes in _ARRAY.findall(shape)
    )


def shape_sizes(shape: str) -> list[int]:
    """Return the sizes of an array shape, or of the first array of a tuple."""
    found = _ARRAY.search(shape)
    if found is None:
        raise HloParseError(f"HLO text: {shape} is no shape of an array")
    return _sizes(found[2])


def _sizes(printed: str) -> list[int]:
    return [int(size.strip(" <=")) for size in printed.split(",") if size.strip()]


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width[1]) if width else 0  # token, opaque


def _instruction(name: str, rest: str) -> Instruction:
    rest = _COMMENT.sub("", rest)
    end = _closing(rest, 0) + 1 if rest.startswith("(") else len(rest.partition(" ")[0])
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    return Instruction(name, shape, opcode, rest[len(opcode) :])


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index
    raise HloParseError(f"HLO text: unbalanced parentheses: {text[:80]!r}")


def _split(text: str) -> list[str]:
    """Split `text` at the commas that are in no brackets and no quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            if character == quote and text[index - 1] != "\\":
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]
