"""What the programs of context parallelism look like: work, memory, and what waits for what."""

import math

import jax
import jax.numpy as jnp
import pytest
from spread_rows import equations, inner_programs, spread

from geojax.hlo import collective_traffic
from geojax.models.attention import blocked
from geojax.models.parallel.parallelism import Parallelism
from geojax.planner.traffic.context import predicted_context_bytes

HEADS, SIZE = 8, 4


def trace(parallelism, length, *, packed=False, forward_only=False):
    row = jax.ShapeDtypeStruct((1, length, HEADS, SIZE), jnp.float32)
    segment_ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if packed else None
    mesh, program = spread(parallelism, packed=packed, forward_only=forward_only)
    return mesh, program.trace(row, row, row, row, segment_ids)


def program_of(*arguments, **options):
    """The program of one rank."""
    (whole,) = trace(*arguments, **options)[1].jaxpr.eqns
    assert whole.primitive.name == "shard_map"
    return whole.params["jaxpr"]


def ancestors(program):
    """Each equation of a program with those that it waits for."""
    waits_for, made_by = {}, {}
    for number, equation in enumerate(program.eqns):
        own = [made_by[v] for v in equation.invars if not hasattr(v, "val") and v in made_by]
        waits_for[number] = frozenset(own).union(*(waits_for[n] for n in own))
        made_by.update(dict.fromkeys(equation.outvars, number))
    for number, equation in enumerate(program.eqns):
        yield equation, [program.eqns[n] for n in waits_for[number]]


def holds(equation, primitive):
    """Whether the equation is such a primitive, or runs a program that holds one."""
    inside = (e for program in inner_programs(equation) for e, _ in equations(program))
    return any(e.primitive.name == primitive for e in (equation, *inside))


def ring_loops(program):
    return [
        inner_programs(e)[0]
        for e, _ in equations(program)
        if e.primitive.name == "scan" and holds(e, "ppermute")
    ]


def test_in_a_step_of_the_ring_transfers_and_work_do_not_wait_for_each_other():
    program = program_of(Parallelism(context=8), 128, packed=True)
    forwards, backwards = ring_loops(program)
    for body, transfers in ((forwards, 3), (backwards, 5)):
        sent = 0
        for equation, before in ancestors(body):
            if equation.primitive.name == "ppermute":
                sent += 1
                assert not any(holds(e, "dot_general") for e in before)
            if holds(equation, "dot_general"):
                assert not any(e.primitive.name == "ppermute" for e in before)
        assert sent == transfers  # key, value and segments; and the gradients of key and value


def test_the_own_block_hides_the_first_and_the_last_transfer():
    program = program_of(Parallelism(context=8), 128)
    top = list(ancestors(program))
    transfers = [(e, before) for e, before in top if e.primitive.name == "ppermute"]
    waiting = [any(holds(e, "dot_general") for e in before) for _, before in transfers]
    # Forwards key and value; backwards they again, to step 1 and on to step 2. Then what is made of
    # them: to the last step, and home.
    assert waiting == [False] * 6 + [True] * 4
    last, before_last = transfers[-1]
    beside_the_last = [
        e
        for e, before in top
        if holds(e, "dot_general")
        and not any(e is other for other in before_last)
        and not any(last is other for other in before)
    ]
    assert beside_the_last


@pytest.mark.parametrize("context", [2, 8])
def test_the_ring_computes_no_masked_block(context):
    chunk = 16
    program = program_of(Parallelism(context=context), 2 * chunk * context, forward_only=True)
    assert "cond" not in {e.primitive.name for e, _ in equations(program)}
    products = [
        times * e.invars[0].aval.size * e.outvars[0].aval.shape[-1]
        for e, times in equations(program)
        if e.primitive.name == "dot_general"
    ]
    scores = (2 * chunk) ** 2 + (context - 1) * 2 * chunk**2
    assert sum(products) == 2 * HEADS * SIZE * scores


@pytest.mark.parametrize(("method", "ranks_of_keys"), [("ring", 1), ("all_gather", 8)])
def test_memory_is_linear_in_the_sequence(method, ranks_of_keys):
    local = 4096
    program = program_of(Parallelism(context=8, context_method=method), 8 * local, packed=True)
    shapes = [v.aval.shape for e, _ in equations(program) for v in e.outvars]
    assert max(sum(dim >= 512 for dim in shape) for shape in shapes) == 1
    tile = 2 * HEADS * blocked.SCANNED_BLOCK**2
    assert max(map(math.prod, shapes)) == max(ranks_of_keys * local * HEADS * SIZE, tile)


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("packed", [False, True])
def test_bytes_of_the_forward_pass(method, packed):
    parallelism = Parallelism(context=8, context_method=method)
    mesh, traced = trace(parallelism, 128, packed=packed, forward_only=True)
    sizes = {"heads": HEADS, "kv_heads": HEADS, "head_dim": SIZE, "value_dim": SIZE}
    sent = predicted_context_bytes(
        parallelism, sequences=1, sequence_length=128, dtype=jnp.float32, packed=packed, **sizes
    )
    assert collective_traffic(traced.lower(), mesh).bytes_over("context") == sent.forward
