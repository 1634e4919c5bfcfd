"""Attention of rows that several ranks share, beside attention of whole rows on one device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from geojax.mesh import make_mesh
from geojax.models.attention import attention
from geojax.models.parallel.sequence_order import position_order

SPEC = PartitionSpec("data", "context", "tensor")
ROW_SPEC = PartitionSpec("data", "context")


def arrays(rows, length, heads, key_heads, size=8, dtype=np.float64):
    """Query, key, value and the gradient of the output."""
    generator = np.random.default_rng(length)
    shapes = [(rows, length, n, size) for n in (heads, key_heads, key_heads, heads)]
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def documents(rows, length):
    """Documents of random lengths, some longer than a chunk, the last positions padding (0)."""
    generator = np.random.default_rng(length)
    numbers = np.sort(generator.integers(1, 5, (rows, length)), axis=1)
    numbers[:, length - length // 7 :] = 0
    return jnp.asarray(numbers, jnp.int32)


def output_and_gradients(query, key, value, cotangent, segment_ids, **options):
    """Attention and the gradients of its three inputs."""

    def attend(query, key, value):
        return attention(query, key, value, segment_ids, **options)

    output, backward = jax.vjp(attend, query, key, value)
    return (output, *backward(cotangent))


def spread(parallelism, *, data=1, packed, forward_only=False, implementation="blocked", **options):
    """A mesh, and `output_and_gradients` (or attention alone) as a program on it."""
    tensor, context = parallelism.tensor, parallelism.context
    devices = jax.devices()[: data * tensor * context]
    mesh = make_mesh(data=data, context=context, tensor=tensor, devices=devices)
    options |= {"implementation": implementation, "parallelism": parallelism}

    def local(query, key, value, cotangent, segment_ids):
        if forward_only:
            return attention(query, key, value, segment_ids, **options)
        return output_and_gradients(query, key, value, cotangent, segment_ids, **options)

    program = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(SPEC, SPEC, SPEC, SPEC, ROW_SPEC if packed else None),
        out_specs=SPEC if forward_only else (SPEC,) * 4,
        check_vma=True,
    )
    return mesh, jax.jit(program)


def in_rank_order(parallelism, operands):
    """Whole rows with their columns as the ranks hold them, one rank after the other."""
    order = position_order(operands[0].shape[1], parallelism)
    return [None if x is None else x[:, order] for x in operands]


def in_row_order(parallelism, results):
    """The inverse of `in_rank_order`."""
    order = np.argsort(position_order(results[0].shape[1], parallelism))
    return [x[:, order] for x in results]


def assert_equal(actual, expected, tolerance):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def equations(jaxpr):
    """Every equation of a program with the number of times it runs, inner programs included."""
    yield from _equations(jaxpr, 1)


def _equations(jaxpr, times):
    for equation in jaxpr.eqns:
        yield equation, times
        inner = times * equation.params.get("length", 1)
        for program in inner_programs(equation):
            yield from _equations(program, inner)


def inner_programs(equation):
    """The programs that an equation runs: of a loop, a call, a custom derivative."""
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
    return [leaf for leaf in leaves if _is_program(leaf)]


def _is_program(value):
    return hasattr(value, "eqns")
