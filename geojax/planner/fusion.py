"""Which results of a program lie in memory, which operations read them, and in what order."""

import collections
import dataclasses

from geojax.planner.flat_program import Buffer, FlatProgram, Operation


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """An operation that runs, together with all that is computed on its way."""

    operation: Operation
    reads: frozenset[Buffer]
    """From memory."""
    results: tuple[Buffer, ...]
    """Those of its results that lie in memory."""


def turns(program: FlatProgram, *, breadth_first: bool = False) -> list[Turn]:
    """The operations of `program` that are not computed where their results are read.

    Args:
        program: what runs.
        breadth_first: for the order: what has become possible first runs first, as XLA for CPUs
            has it; otherwise operations run as they were written.
    """
    in_memory, computed_again = _results_in_memory(program)
    sources: dict[Buffer, frozenset[Buffer]] = {
        buffer: frozenset((buffer,)) for buffer in (*program.constants, *program.inputs)
    }
    running = []
    for operation in program.operations:
        nothing: frozenset[Buffer] = frozenset()
        reads = nothing.union(*(sources.get(buffer, nothing) for buffer in operation.inputs))
        results = tuple(buffer for buffer in operation.outputs if buffer in in_memory)
        if operation.reads_memory or results:
            running.append(Turn(operation, reads, results))
        for buffer in operation.outputs:
            itself = buffer in in_memory and buffer not in computed_again
            sources[buffer] = frozenset((buffer,)) if itself else reads
    return _breadth_first(running) if breadth_first else running


def _results_in_memory(program: FlatProgram) -> tuple[set[Buffer], set[Buffer]]:
    """The results that lie in memory, and those of them that others do not read but compute again.

    Others compute a cheap result of the whole program again, as it is cheaper than reading it.
    """
    results = {buffer for buffer in program.outputs if buffer is not None}
    readers: dict[Buffer, set[Operation]] = {}
    read_from_memory: set[Buffer] = set()
    in_memory: set[Buffer] = set()
    computed_again: set[Buffer] = set()
    for operation in reversed(program.operations):
        own_readers: set[Operation] = set()
        for buffer in operation.outputs:
            of_it = readers.get(buffer, set())
            several = operation.expensive and len(of_it) > 1
            if not operation.fusible or buffer in read_from_memory or buffer.whole or several:
                in_memory.add(buffer)
                own_readers.add(operation)
            elif buffer in results:
                in_memory.add(buffer)
                computed_again.add(buffer)
                own_readers |= of_it | {operation}
            else:
                own_readers |= of_it
        for buffer in operation.inputs:
            readers.setdefault(buffer, set()).update(own_readers)
            if operation.reads_memory:
                read_from_memory.add(buffer)
    return in_memory, computed_again


def _breadth_first(running: list[Turn]) -> list[Turn]:
    maker = {buffer: turn for turn in running for buffer in turn.operation.outputs}
    waits_for = {turn: {maker[read] for read in turn.reads if read in maker} for turn in running}
    followers: dict[Turn, list[Turn]] = {turn: [] for turn in running}
    for turn, makers in waits_for.items():
        for each in makers:
            followers[each].append(turn)
    missing = {turn: len(makers) for turn, makers in waits_for.items()}
    ready = collections.deque(turn for turn in running if not missing[turn])
    order = []
    while ready:
        turn = ready.popleft()
        order.append(turn)
        for follower in followers[turn]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    assert len(order) == len(running), "operations wait for each other"
    return order
