"""Fusion and order: the results of a program that lie in memory, when they are made and read."""

import collections
import dataclasses
from collections.abc import Container, Mapping

from geojax.planner.flat_program import Buffer, FlatProgram, Operation


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledOp:
    """An operation that runs by itself, together with all that is fused into it."""

    operation: Operation
    reads: frozenset[Buffer]
    """The buffers that it reads from memory."""
    results: tuple[Buffer, ...]
    """The results that lie in memory."""


def schedule(program: FlatProgram, *, breadth_first: bool = False) -> list[ScheduledOp]:
    """List the operations of `program` that are not computed where their results are read.

    Args:
        program: the program or the body of a loop.
        breadth_first: True to run first the operation that became ready first, as XLA for CPUs
            does; otherwise operations run as they were written, but for those that can wait until
            a collective has started.
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
        if operation.reads_memory or results or (operation.waits and not breadth_first):
            running.append(ScheduledOp(operation, reads, results))
        for buffer in operation.outputs:
            itself = buffer in in_memory and buffer not in computed_again
            sources[buffer] = frozenset((buffer,)) if itself else reads
    return _breadth_first(running) if breadth_first else _collectives_first(running)


def _results_in_memory(program: FlatProgram) -> tuple[set[Buffer], set[Buffer]]:
    """Return the results in memory, and those of them that readers compute again.

    A cheap result of the whole program lies in memory, but other readers compute it again, as that
    is cheaper than reading it.
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
            if (
                not operation.fusible
                or buffer in read_from_memory
                or buffer.materialized
                or several
            ):
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


def _collectives_first(running: list[ScheduledOp]) -> list[ScheduledOp]:
    """Start each collective as soon as what it sends is there, and run beside it what can wait.

    An operation is put off until collectives have started that were written behind it, and never
    over a barrier or the first reader of what such a collective brings.
    """
    maker = {buffer: each for each in running for buffer in each.operation.outputs}
    order: dict[ScheduledOp, None] = {}
    written: list[ScheduledOp] = []
    put_off: list[ScheduledOp] = []
    travelling: set[Buffer] = set()
    for each in running:
        written.append(each)
        if each.operation.sends:
            needed = _with_makers(each, maker, done=order)
            for other in (other for other in written if other in needed):
                if not travelling.isdisjoint(other.reads):
                    order.update(dict.fromkeys(put_off))
                    travelling.clear()
                order[other] = None
            travelling.update(each.results)
            written = [other for other in written if other not in order]
            put_off = list(written)
        elif each.operation.waits:
            order.update(dict.fromkeys(written))
            written, put_off = [], []
            travelling.clear()
    return [*order, *(each for each in written if each not in order)]


def _with_makers(
    one: ScheduledOp, maker: Mapping[Buffer, ScheduledOp], done: Container[ScheduledOp]
) -> set[ScheduledOp]:
    """Return `one` and all that has to run before it and is not `done`."""
    found, missing = {one}, [one]
    while missing:
        for read in missing.pop().reads:
            source = maker.get(read)
            if source is not None and source not in done and source not in found:
                found.add(source)
                missing.append(source)
    return found


def _breadth_first(running: list[ScheduledOp]) -> list[ScheduledOp]:
    maker = {buffer: each for each in running for buffer in each.operation.outputs}
    waits_for = {each: {maker[read] for read in each.reads if read in maker} for each in running}
    followers: dict[ScheduledOp, list[ScheduledOp]] = {each: [] for each in running}
    for follower, makers in waits_for.items():
        for each in makers:
            followers[each].append(follower)
    missing = {each: len(makers) for each, makers in waits_for.items()}
    ready = collections.deque(each for each in running if not missing[each])
    order = []
    while ready:
        each = ready.popleft()
        order.append(each)
        for follower in followers[each]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    assert len(order) == len(running), "the operations of a program must not wait for each other"
    return order
