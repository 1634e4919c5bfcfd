"""How many bytes of buffers a program holds at once: its peak, and what lies there then.

The operations run in the order in which they were written, and these are the compiler's rules that
count:

- What is computed element by element is computed where it is read (fusion): it takes no memory
  unless it is a result, an operand of something that reads memory (a matrix product, a
  collective, a loop), or expensive and read more than once.
- What depends on nothing (zeros) is made when it is first read; breadth first, at once.
- A buffer is freed after its last reader. A result that is computed element by element from an
  operand of the same size that nobody reads later takes that operand's place.
- A loop holds its carry once, and all that it stacks from its beginning on.
- The arguments of the whole program are held throughout; a result that is donated an argument takes
  its place.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from geojax.planner.flat_program import Buffer, FlatProgram, Operation, flatten
from geojax.planner.fusion import Turn, turns


@dataclasses.dataclass(frozen=True)
class Accounting:
    """How the bytes of a program are told apart."""

    kind: Callable[[Operation, Buffer], str]
    """What a new buffer is. What a loop carries stays what it was."""
    phase: Callable[[Operation], str]
    """The part of the program that an operation belongs to."""
    breadth_first: bool = False
    """Whether operations run breadth first and not in the order in which they were written."""
    wide: bool = False
    """Whether what is computed in 16-bit floats lies in memory as 32-bit ones."""
    wide_stacks: bool = False
    """Whether what loops stack does so too."""

    def bytes(self, buffer: Buffer) -> int:
        """What a computed buffer takes."""
        return _widened(buffer) if self.wide else buffer.bytes

    def stack_bytes(self, buffer: Buffer) -> int:
        """What a buffer takes that a loop stacks."""
        return _widened(buffer) if self.wide_stacks else buffer.bytes


def _widened(buffer: Buffer) -> int:
    return max(buffer.bytes, 4 * buffer.size) if buffer.floating else buffer.bytes


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a program holds when a phase of it holds most."""

    bytes: int
    by_kind: Counter[str]


def peaks(
    program: FlatProgram, accounting: Accounting, donated: Mapping[int, int] | None = None
) -> dict[str, Moment]:
    """For each phase of `program`, whose inputs have their kinds, when it holds most.

    Args:
        program: the whole program: its inputs are held throughout.
        accounting: how its bytes are told apart.
        donated: for results, by position, the position of the input whose place they take.
    """
    walk = _Walk(program, accounting, pinned=frozenset(program.inputs))
    for result, place in (donated or {}).items():
        buffer = program.outputs[result]
        if buffer is not None:
            walk.donated[buffer] = program.inputs[place]
    return walk.run()


class _Walk:
    """One program, or one turn of a loop's body."""

    def __init__(
        self,
        program: FlatProgram,
        accounting: Accounting,
        *,
        pinned: frozenset[Buffer] = frozenset(),
        outside: frozenset[Buffer] = frozenset(),
    ):
        """`pinned` inputs are never freed; those `outside` are counted by who runs the loop."""
        self.donated: dict[Buffer, Buffer] = {}
        self._accounting = accounting
        self._kept = pinned | outside | frozenset(b for b in program.outputs if b is not None)
        self._turns = turns(program, breadth_first=accounting.breadth_first)
        self._last_read = {
            buffer: index for index, turn in enumerate(self._turns) for buffer in turn.reads
        }
        self._held: dict[Buffer, int] = {
            buffer: buffer.bytes if buffer in pinned else accounting.bytes(buffer)
            for buffer in (*program.constants, *program.inputs)
            if buffer not in outside
        }
        self._not_made_yet: set[Buffer] = set()
        self._peaks: dict[str, Moment] = {}

    def run(self) -> dict[str, Moment]:
        for index, turn in enumerate(self._turns):
            operation = turn.operation
            dying = {
                buffer
                for buffer in turn.reads
                if self._last_read[buffer] == index and buffer not in self._kept
            }
            for buffer in turn.reads & self._not_made_yet:
                self._not_made_yet.remove(buffer)
                self._held[buffer] = self._accounting.bytes(buffer)
            if operation.name in ("scan", "while"):
                self._loop(operation, dying)
            elif operation.name == "cond":
                self._branches(operation, dying)
            else:
                self._compute(index, turn, dying)
            for buffer in dying:
                self._held.pop(buffer, None)
            for buffer in operation.outputs:
                if buffer not in self._kept and buffer not in self._last_read:
                    self._held.pop(buffer, None)
        return self._peaks

    def _compute(self, index: int, turn: Turn, dying: set[Buffer]) -> None:
        operation = turn.operation
        for buffer in turn.results:
            buffer.kind = self._accounting.kind(operation, buffer)
            if self._waits(operation) and buffer not in self._kept:
                self._not_made_yet.add(buffer)  # zeros, for instance: they need wait for nothing
                continue
            argument = self.donated.get(buffer)
            if argument is not None and self._last_read.get(argument, -1) <= index:
                self._held[buffer] = 0
                continue
            place = self._place(operation, buffer, dying)
            if place is not None:
                dying.remove(place)
                del self._held[place]
            self._held[buffer] = self._accounting.bytes(buffer)
        self._note(self._accounting.phase(operation))

    def _waits(self, operation: Operation) -> bool:
        """Whether the operation runs when its result is first read: zeros, for instance.

        Breadth first it runs at once.
        """
        return operation.fusible and not operation.inputs and not self._accounting.breadth_first

    def _place(
        self, operation: Operation, buffer: Buffer, dying: Iterable[Buffer]
    ) -> Buffer | None:
        if not operation.in_place:
            return None
        fitting = (old for old in dying if old.bytes == buffer.bytes and old in self._held)
        return next(fitting, None)

    def _loop(self, operation: Operation, dying: set[Buffer]) -> None:
        loop = _loop_of(operation)
        body = loop.body
        carried = body.inputs[loop.constants : loop.constants + loop.carried]
        initial = operation.inputs[loop.first :][: loop.carried]
        for inside, outer in zip(carried, initial, strict=True):
            inside.kind = outer.kind or self._accounting.kind(operation, inside)
            if outer in dying and outer in self._held:
                dying.remove(outer)
                del self._held[outer]
        stacked = operation.outputs[loop.carried :]
        for buffer in stacked:
            buffer.kind = self._accounting.kind(operation, buffer)
            self._held[buffer] = self._accounting.stack_bytes(buffer)
        shared = operation.inputs[loop.first - loop.constants : loop.first]
        for inside, outer in zip(body.inputs, shared, strict=False):
            inside.kind = outer.kind
        outside = frozenset(body.inputs) - frozenset(carried)
        turn = _Walk(body, self._accounting, outside=outside).run()
        self._note_inner(turn)
        for buffer, inside in zip(operation.outputs, carried, strict=False):
            buffer.kind = inside.kind or self._accounting.kind(operation, buffer)
            self._held[buffer] = self._accounting.bytes(buffer)

    def _branches(self, operation: Operation, dying: set[Buffer]) -> None:
        operands = operation.inputs[1:]
        # What nobody reads later is the branch's own: a result may take its place.
        given = {
            outer
            for outer in operands
            if outer in dying and outer in self._held and operands.count(outer) == 1
        }
        for outer in given:
            dying.remove(outer)
            del self._held[outer]
        for branch in operation.parameters["branches"]:
            program = flatten(branch, operation.scopes)
            for inside, outer in zip(program.inputs, operands, strict=True):
                inside.kind = outer.kind
            shared = frozenset(
                inside
                for inside, outer in zip(program.inputs, operands, strict=True)
                if outer not in given
            )
            self._note_inner(_Walk(program, self._accounting, outside=shared).run())
        for buffer in operation.outputs:
            buffer.kind = self._accounting.kind(operation, buffer)
            self._held[buffer] = self._accounting.bytes(buffer)

    def _note(self, phase: str, inner: Moment | None = None) -> None:
        total = sum(self._held.values()) + (inner.bytes if inner else 0)
        if phase in self._peaks and total <= self._peaks[phase].bytes:
            return
        kinds: Counter[str] = Counter(inner.by_kind if inner else ())
        for buffer, held in self._held.items():
            kinds[buffer.kind] += held
        self._peaks[phase] = Moment(total, kinds)

    def _note_inner(self, turn: dict[str, Moment]) -> None:
        for phase, moment in turn.items():
            self._note(phase, moment)


@dataclasses.dataclass(frozen=True)
class _Loop:
    body: FlatProgram
    first: int  # position of the first initial value among the operation's inputs
    constants: int  # of the body
    carried: int


def _loop_of(operation: Operation) -> _Loop:
    parameters, scopes = operation.parameters, (*operation.scopes, operation.name)
    if operation.name == "while":
        tests, constants = parameters["cond_nconsts"], parameters["body_nconsts"]
        body = flatten(parameters["body_jaxpr"], scopes)
        return _Loop(body, tests + constants, constants, len(body.inputs) - constants)
    body = flatten(parameters["jaxpr"], scopes)
    # What is sliced has one dim more outside, and so has what is stacked. (The parameters that
    # count them differ between versions of JAX.)
    sliced = sum(
        dims > len(buffer.shape)
        for dims, buffer in zip(operation.input_dims, body.inputs, strict=True)
    )
    carried = sum(
        len(buffer.shape) == dims
        for buffer, dims in zip(operation.outputs, body.output_dims, strict=True)
    )
    constants = len(body.inputs) - carried - sliced
    slices = tuple(
        Operation("dynamic_slice", scopes, (Buffer((), None),), (own,), {})
        for own in body.inputs[constants + carried :]
    )
    stacks = tuple(buffer for slice_ in slices for buffer in slice_.inputs)
    body = FlatProgram(
        body.constants,
        (*body.inputs[: constants + carried], *stacks),
        (*slices, *body.operations),
        body.outputs,
        body.output_dims,
    )
    return _Loop(body, constants, constants, carried)
