"""Which columns a rank holds, and which sizes are refused."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from spread_rows import arrays, in_rank_order, spread

from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.models.attention import attention, context_unsupported_reason
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.sequence_order import local_positions, position_order
from geojax.planner.traffic.context import predicted_context_bytes

METHODS = ["ring", "all_gather", "ulysses"]


@pytest.mark.parametrize("method", METHODS)
def test_the_ranks_hold_the_columns_that_the_host_gives_them(method):
    parallelism = Parallelism(context=4, context_method=method)
    spec = PartitionSpec("context")
    program = jax.shard_map(
        lambda: local_positions(6, parallelism),
        mesh=make_mesh(data=2, context=4),
        in_specs=(),
        out_specs=spec,
    )
    assert np.asarray(program()).tolist() == position_order(24, parallelism).tolist()


def test_zig_zag_gives_every_rank_the_same_work():
    order = position_order(48, Parallelism(context=4)).reshape(4, -1)
    assert set(order.sum(axis=1)) == {48 * 47 // 2 // 4}


@pytest.mark.parametrize(
    ("method", "sequence", "heads", "tensor", "message"),
    [
        ("ring", 100, 8, 1, "multiple of 16, and it is 100; 96 or 112 would work"),
        ("all_gather", 8, 8, 1, "multiple of 16, and it is 8; 16 would work"),
        ("ulysses", 100, 8, 1, "multiple of 8, and it is 100; 96 or 104 would work"),
        ("ulysses", 64, 12, 1, "12 query heads to 8 ranks; a context of 1, 2, 3, 4, 6, 12 would"),
        ("ulysses", 64, 8, 2, "4 query heads on each of 2 tensor ranks to 8 ranks"),
    ],
)
def test_obstacles_say_what_would_work(method, sequence, heads, tensor, message):
    parallelism = Parallelism(tensor=tensor, context=8, context_method=method)
    obstacle = context_unsupported_reason(parallelism, sequence=sequence, heads=heads)
    assert message in obstacle
    assert "\n" not in obstacle


@pytest.mark.parametrize("method", METHODS)
def test_sizes_that_work(method):
    parallelism = Parallelism(tensor=2, context=4, context_method=method)
    assert context_unsupported_reason(parallelism, sequence=64, heads=8) is None
    assert context_unsupported_reason(Parallelism(), sequence=63, heads=7) is None


def test_nothing_is_sent_where_rows_are_whole():
    sizes = {"sequences": 2, "sequence_length": 64, "heads": 4, "kv_heads": 2}
    dims = {"head_dim": 8, "value_dim": 4}
    sent = predicted_context_bytes(Parallelism(), **sizes, **dims, dtype=np.float32, packed=True)
    assert (sent.forward, sent.backward) == (0, 0)


def refusal(parallelism, length=32, heads=4, mesh=None, implementation="blocked"):
    x = jax.ShapeDtypeStruct((1, length, heads, 8), np.float32)

    def local(query, key, value):
        return attention(query, key, value, implementation=implementation, parallelism=parallelism)

    function = local
    if mesh is not None:
        spec = PartitionSpec(None, "context")
        function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(UserError) as error:
        jax.eval_shape(function, x, x, x)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_attention_refuses_what_cannot_be():
    mesh = make_mesh(data=2, context=4)
    ring, ulysses = Parallelism(context=4), Parallelism(context=4, context_method="ulysses")
    assert "no mesh axis 'context'" in refusal(ring)
    assert "context axis has 4 ranks, not 2" in refusal(Parallelism(context=2), mesh=mesh)
    assert "multiple of 8, and it is 36" in refusal(ring, length=36, mesh=mesh)
    assert "6 query heads to 4 ranks" in refusal(ulysses, heads=6, mesh=mesh)
    assert "use blocked or auto" in refusal(ring, mesh=mesh, implementation="reference")


@pytest.mark.usefixtures("float64")
def test_the_reference_sees_whole_rows_through_ulysses():
    parallelism = Parallelism(context=4, context_method="ulysses")
    operands = [*arrays(1, 32, heads=4, key_heads=4), None]
    results = [
        spread(parallelism, packed=False, implementation=name)[1](
            *in_rank_order(parallelism, operands)
        )
        for name in ("reference", "blocked")
    ]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
