"""Peak memory of a program: a walk through its operations that follows every buffer.

The operations run in the order in which they were written, by the rules of the compiler that
matter:

- Elementwise operations are computed where their results are read (fusion). Such a result takes
  memory in three cases only. It is a result of the program, it is expensive and read more than
  once, or an operation that reads memory takes it: a matrix product, a collective, a loop.
- A value that depends on nothing (zeros) is made when it is first read; breadth first, at once.
- A collective starts when what it sends is there, before operations that can wait, and both what it
  sends and what arrives are held until the result is read: accelerators run them side by side.
- A buffer is freed after its last reader. A result that is computed element by element from an
  operand of the same size that is not read later takes that operand's place.
- A loop holds its carry once, and all that it stacks from its beginning on.
- The arguments of the whole program are held throughout; a result that is donated an argument takes
  its place.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import jax

from geojax.planner import primitives
from geojax.planner.flat_program import Buffer, FlatProgram, Operation, flatten
from geojax.planner.fusion import ScheduledOp, schedule


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler's habits that decide how much memory a program takes."""

    breadth_first: bool = False
    """True if it runs operations breadth first, not in the order in which they were written."""
    widens_16_bit: bool = False
    """True if it computes 16-bit floats as 32-bit ones and keeps them so in memory."""
    widens_moved: bool = False
    """True if that includes what a collective gathers or a loop stacks."""


XLA_ACCELERATOR = Compiler()
"""XLA for GPUs."""

XLA_CPU = Compiler(
    breadth_first=True, widens_16_bit=True, widens_moved=jax.__version_info__ < (0, 11)
)
"""XLA for CPUs, which simulated devices run on."""


@dataclasses.dataclass(frozen=True)
class Accounting:
    """The categories and sizes by which the bytes of a program are counted."""

    kind: Callable[[Operation, Buffer], str]
    """The category of a new buffer. A loop's carry stays in its category."""
    phase: Callable[[Operation], str]
    """The part of the program that an operation belongs to."""
    compiler: Compiler = XLA_ACCELERATOR
    """The compiler that lays out the program."""

    def bytes(self, buffer: Buffer) -> int:
        """Return the size of a computed buffer."""
        compiler = self.compiler
        widens = compiler.widens_moved if buffer.moved else compiler.widens_16_bit
        return _widened(buffer) if widens else buffer.bytes


def _widened(buffer: Buffer) -> int:
    return max(buffer.bytes, 4 * buffer.size) if buffer.floating else buffer.bytes


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The memory that a program holds at the peak of a phase."""

    bytes: int
    """The sum of the bytes held."""
    by_kind: Counter[str]
    """The bytes held, by category."""


def peaks(
    program: FlatProgram, accounting: Accounting, donated: Mapping[int, int] | None = None
) -> dict[str, Snapshot]:
    """Return the peak of each phase of `program`, whose inputs have their kinds.

    Args:
        program: the whole program: its inputs are held throughout.
        accounting: the categories and sizes by which its bytes are counted.
        donated: for each donated result, by position, the position of the input it replaces.
    """
    walk = _Walk(program, accounting, pinned=frozenset(program.inputs))
    for result, argument in (donated or {}).items():
        buffer = program.outputs[result]
        if buffer is not None:
            walk.donated[buffer] = program.inputs[argument]
    return walk.run()


class _Walk:
    """A walk through one program, or through one iteration of a loop's body."""

    def __init__(
        self,
        program: FlatProgram,
        accounting: Accounting,
        *,
        pinned: frozenset[Buffer] = frozenset(),
        outside: frozenset[Buffer] = frozenset(),
    ):
        """`pinned` inputs are never freed; `outside` ones are counted by the walk around."""
        self.donated: dict[Buffer, Buffer] = {}
        self._accounting = accounting
        self._kept = pinned | outside | frozenset(b for b in program.outputs if b is not None)
        self._schedule = schedule(program, breadth_first=accounting.compiler.breadth_first)
        self._loops = {
            each: _loop_of(each) for each in program.operations if each.name in primitives.LOOPS
        }
        for operation, loop in self._loops.items():
            loop.mark_stacks(operation)
        self._last_read = {
            buffer: index for index, each in enumerate(self._schedule) for buffer in each.reads
        }
        if not accounting.compiler.breadth_first:
            self._hold_what_travels()
        self._held: dict[Buffer, int] = {
            buffer: buffer.bytes if buffer in pinned else accounting.bytes(buffer)
            for buffer in (*program.constants, *program.inputs)
            if buffer not in outside
        }
        self._not_made_yet: set[Buffer] = set()
        self._peaks: dict[str, Snapshot] = {}

    def run(self) -> dict[str, Snapshot]:
        dying_at: dict[int, set[Buffer]] = {}
        for buffer, index in self._last_read.items():
            if buffer not in self._kept:
                dying_at.setdefault(index, set()).add(buffer)
        for index, scheduled in enumerate(self._schedule):
            operation = scheduled.operation
            dying = dying_at.get(index, set())
            for buffer in scheduled.reads & self._not_made_yet:
                self._not_made_yet.remove(buffer)
                self._held[buffer] = self._accounting.bytes(buffer)
            if operation in self._loops:
                self._loop(operation, dying)
            elif operation.name == "cond":
                self._branches(operation, dying)
            else:
                self._compute(index, scheduled, dying)
            for buffer in dying:
                self._held.pop(buffer, None)
            for buffer in operation.outputs:
                if buffer not in self._kept and buffer not in self._last_read:
                    self._held.pop(buffer, None)
        return self._peaks

    def _hold_what_travels(self) -> None:
        """Let a message's operands be held until its result is read, or the program ends."""
        first_read: dict[Buffer, int] = {}
        for index, each in enumerate(self._schedule):
            for buffer in each.reads:
                first_read.setdefault(buffer, index)
        end = len(self._schedule)
        for index, each in enumerate(self._schedule):
            if each.operation.sends:
                arrives = min((first_read.get(b, end) for b in each.results), default=index + 1)
                for buffer in each.reads:
                    self._last_read[buffer] = max(self._last_read[buffer], arrives - 1)

    def _compute(self, index: int, scheduled: ScheduledOp, dying: set[Buffer]) -> None:
        operation = scheduled.operation
        for buffer in scheduled.results:
            buffer.kind = self._accounting.kind(operation, buffer)
            if self._is_deferred(operation) and buffer not in self._kept:
                self._not_made_yet.add(buffer)  # zeros, for instance: they need wait for nothing
                continue
            argument = self.donated.get(buffer)
            if argument is not None and self._last_read.get(argument, -1) <= index:
                self._held[buffer] = 0
                continue
            reused = self._reusable(operation, buffer, dying & scheduled.reads)
            if reused is not None:
                dying.remove(reused)
                del self._held[reused]
            self._held[buffer] = self._accounting.bytes(buffer)
        self._note(self._accounting.phase(operation))

    def _is_deferred(self, operation: Operation) -> bool:
        """Tell if the operation runs when its result is first read: zeros, for instance."""
        breadth_first = self._accounting.compiler.breadth_first
        return operation.fusible and not operation.inputs and not breadth_first

    def _reusable(
        self, operation: Operation, buffer: Buffer, dying: Iterable[Buffer]
    ) -> Buffer | None:
        if not operation.in_place:
            return None
        fitting = (old for old in dying if old.bytes == buffer.bytes and old in self._held)
        return next(fitting, None)

    def _loop(self, operation: Operation, dying: set[Buffer]) -> None:
        loop = self._loops[operation]
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
            buffer.kind, buffer.moved = self._accounting.kind(operation, buffer), True
            self._held[buffer] = self._accounting.bytes(buffer)
        shared = operation.inputs[loop.first - loop.constants : loop.first]
        for inside, outer in zip(body.inputs, shared, strict=False):
            inside.kind = outer.kind
        outside = frozenset(body.inputs) - frozenset(carried)
        self._note_inner(_Walk(body, self._accounting, outside=outside).run())
        for buffer, inside in zip(operation.outputs, carried, strict=False):
            buffer.kind = inside.kind or self._accounting.kind(operation, buffer)
            self._held[buffer] = self._accounting.bytes(buffer)

    def _branches(self, operation: Operation, dying: set[Buffer]) -> None:
        operands = operation.inputs[1:]
        # An operand that is not read later belongs to the branch: a result may take its place.
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

    def _note(self, phase: str, inner: Snapshot | None = None) -> None:
        total = sum(self._held.values()) + (inner.bytes if inner else 0)
        if phase in self._peaks and total <= self._peaks[phase].bytes:
            return
        kinds: Counter[str] = Counter(inner.by_kind if inner else ())
        for buffer, held in self._held.items():
            kinds[buffer.kind] += held
        self._peaks[phase] = Snapshot(total, kinds)

    def _note_inner(self, inner: dict[str, Snapshot]) -> None:
        for phase, snapshot in inner.items():
            self._note(phase, snapshot)


@dataclasses.dataclass(frozen=True)
class _Loop:
    body: FlatProgram
    first: int  # position of the first initial value among the operation's inputs
    constants: int  # of the body
    carried: int

    def mark_stacks(self, operation: Operation) -> None:
        """Mark the buffers that the loop carries only to write slices into them."""
        readers: dict[Buffer, list[Operation]] = {}
        for inner in self.body.operations:
            for buffer in inner.inputs:
                readers.setdefault(buffer, []).append(inner)
        for before, inside, written, after in zip(
            operation.inputs[self.first : self.first + self.carried],
            self.body.inputs[self.constants :],
            self.body.outputs,
            operation.outputs,
            strict=False,
        ):
            match readers.get(inside, []):
                case [
                    Operation(name="dynamic_update_slice", inputs=(stack, *_), outputs=(result,))
                ]:
                    if stack is inside and result is written:
                        for buffer in (before, inside, result, after):
                            buffer.moved = True


def _loop_of(operation: Operation) -> _Loop:
    parameters, scopes = operation.parameters, (*operation.scopes, operation.name)
    if operation.name == "while":
        tests, constants = parameters["cond_nconsts"], parameters["body_nconsts"]
        body = flatten(parameters["body_jaxpr"], scopes)
        return _Loop(body, tests + constants, constants, len(body.inputs) - constants)
    body = flatten(parameters["jaxpr"], scopes)
    # A sliced input has one dim more outside, and so has a stacked output. (The parameters that
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
