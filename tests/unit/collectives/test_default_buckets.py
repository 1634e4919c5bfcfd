"""With a wire format leaves share messages of 64 MiB by default; the sums are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from geojax.collectives import BFLOAT16, INT8, all_reduce, reduce_scatter
from geojax.errors import UserError
from geojax.hlo import collective_traffic
from geojax.optim import sync_across_sites

LAYER = {"kernel": (6, 4), "bias": (4,), "scale": (6,), "output": (4, 300)}
LEAVES = 2 * len(LAYER)


def summands():
    """The leaves of two layers, [devices, *shape]: every device's own numbers."""
    generator = np.random.default_rng(0)
    return [
        {
            name: jnp.asarray(generator.normal(size=(4, *shape)), jnp.float32)
            for name, shape in LAYER.items()
        }
        for _ in range(2)
    ]


def synced(tree, **options):
    sync = sync_across_sites("data", "dc", **options)
    return sync.update(tree, sync.init(tree))[0]


FUNCTIONS = {
    "all_reduce": (lambda tree, **options: all_reduce(tree, "data", "dc", **options), P()),
    "reduce_scatter": (
        lambda tree, **options: reduce_scatter(tree, "data", "dc", dims=0, **options),
        P("data"),
    ),
    "sync_across_sites": (synced, P()),
}


def messages_and_sums(mesh, name, **options):
    """The messages over `dc` that a compiled program sends, and its sums."""
    function, out_specs = FUNCTIONS[name]
    program = jax.jit(
        jax.shard_map(
            lambda tree: function(jax.tree.map(lambda leaf: leaf[0], tree), **options),
            mesh=mesh,
            in_specs=P(("dc", "data")),
            out_specs=out_specs,
        )
    )
    compiled = program.lower(summands()).compile()
    sent = [each for each in collective_traffic(compiled, mesh).collectives if "dc" in each.axes]
    return sum(each.executions for each in sent), compiled(summands())


@pytest.mark.parametrize("wire", [BFLOAT16, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wire_format_sends_all_leaves_in_one_message_and_by_none_each_alone(mesh_of, name, wire):
    mesh = mesh_of(dc=2, data=2)
    by_default, sums = messages_and_sums(mesh, name, wire=wire)
    by_leaf, expected = messages_and_sums(mesh, name, wire=wire, bucket_bytes=None)
    assert (by_default, by_leaf) == (1, LEAVES)
    jax.tree.map(np.testing.assert_array_equal, sums, expected)


@pytest.mark.parametrize("bucket_bytes", ["64MiB", 2.0**26])
def test_no_number_of_bytes_is_refused(mesh_of, bucket_bytes):
    with pytest.raises(UserError, match="is no number of bytes; give an int, None for a message"):
        messages_and_sums(mesh_of(dc=2, data=2), "all_reduce", bucket_bytes=bucket_bytes)
