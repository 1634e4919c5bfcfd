"""An all-reduce in phases is the same all-reduce, and only one of its phases crosses sites."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from geojax.collectives import (
    BFLOAT16,
    INT8,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from geojax.collectives.exchange import exchange_together
from geojax.hlo import collective_traffic

SHAPES = {"matrix": (30, 70), "vector": (1001,), "scalar": (), "empty": (0, 3)}
BUCKET_BYTES = 4096

pytestmark = pytest.mark.usefixtures("float64")


def tree_of(leading, seed):
    generator = np.random.default_rng(seed)
    tree = {name: generator.normal(size=(*leading, *shape)) for name, shape in SHAPES.items()}
    return tree | {"count": generator.integers(9, size=(*leading, 5))}


def run(mesh, reduce, errors):
    """The program that sums what all devices hold, and the errors that it is given."""

    def step(tree, before):
        own, before = jax.tree.map(lambda leaf: leaf[0], (tree, before))
        made = reduce(own, before if errors else None)
        total, after = made if errors else (made, None)
        return total, jax.tree.map(lambda leaf: leaf[None], after)

    program = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(("dc", "data")), P("dc")),
        out_specs=(P(), P("dc")),
    )
    before = tree_of((mesh.shape["dc"],), seed=1)
    return jax.jit(program).lower(tree_of((mesh.size,), seed=0), before).compile(), before


@pytest.mark.parametrize(
    ("sites", "ranks", "wire", "errors"),
    [
        (2, 2, None, False),
        (2, 1, BFLOAT16, False),
        (2, 2, INT8, True),
        (3, 2, INT8, True),
        (1, 2, None, True),
    ],
)
def test_in_phases_the_sum_has_the_same_bits(mesh_of, sites, ranks, wire, errors):
    mesh = mesh_of(dc=sites, data=ranks)
    options = {"bucket_bytes": BUCKET_BYTES, "wire": wire}

    def at_once(tree, before):
        return all_reduce(tree, "data", "dc", error_feedback=before, **options)

    def in_phases(tree, before):
        started = start_all_reduce(tree, "data", "dc", error_feedback=before, **options)
        exchanged = jax.tree.map(jnp.asarray, started).exchange()  # what is carried is a plain tree
        return exchanged.done()

    made = {}
    for reduce in (at_once, in_phases):
        program, before = run(mesh, reduce, errors)
        made[reduce] = program(tree_of((mesh.size,), seed=0), before)
    jax.tree.map(np.testing.assert_array_equal, made[at_once], made[in_phases])
    exact = {name: leaf.sum(0) for name, leaf in tree_of((mesh.size,), seed=0).items()}
    np.testing.assert_array_equal(
        made[in_phases][0]["count"], exact["count"] + (before["count"].sum(0) if errors else 0)
    )


@pytest.mark.parametrize("wire", [None, INT8])
def test_a_reduce_scatter_in_phases_has_the_same_bits(mesh_of, wire):
    mesh = mesh_of(dc=2, data=2)
    matrix = np.random.default_rng(0).normal(size=(4, 30, 70))
    errors = np.random.default_rng(1).normal(size=(4, 15, 70))
    options = {"dims": 0, "bucket_bytes": BUCKET_BYTES, "wire": wire}

    def in_phases(*arguments, **named):
        return start_reduce_scatter(*arguments, **named).exchange().done()

    def run(operation):
        def step(own, before):
            made = operation(own[0], "data", "dc", error_feedback=before[0], **options)
            return jax.tree.map(lambda leaf: leaf[None], made)

        by_device = P(("dc", "data"))
        program = jax.shard_map(
            step, mesh=mesh, in_specs=by_device, out_specs=by_device, check_vma=False
        )
        return jax.jit(program)(matrix, errors)

    made = run(in_phases)
    jax.tree.map(np.testing.assert_array_equal, made, run(reduce_scatter))
    shards, lost = map(np.asarray, made)
    exact = matrix.sum(0).reshape(2, 15, 70) + errors[:2] + errors[2:]
    np.testing.assert_allclose(shards[:2] + lost[:2] + lost[2:], exact, atol=1e-12)


@pytest.mark.parametrize(("sites", "wire"), [(2, None), (2, BFLOAT16), (3, INT8)])
def test_sums_in_one_message_have_the_same_bits(mesh_of, sites, wire):
    mesh = mesh_of(dc=sites, data=2)
    options = {"wire": wire, "bucket_bytes": BUCKET_BYTES}

    def reduce(tree, before, *, together):
        started = start_all_reduce(tree, "data", "dc", error_feedback=before, **options)
        alike = [each for each in started.sums if each.kind == started.sums[-1].kind]
        others = [each for each in started.sums if each.kind != started.sums[-1].kind]
        assert others, "integers and empty arrays are of other kinds"
        own = map(exchange_together, [alike] if together else [[each] for each in alike])
        rest = (each.exchange() for each in others)
        return [each.done() for each in itertools.chain(*own, rest)]

    def step(tree, before, *, together):
        tree, before = jax.tree.map(lambda leaf: leaf[0], (tree, before))
        made = reduce(tree, before, together=together)
        return jax.tree.map(lambda leaf: leaf[None], made)

    programs, by_device = [], P(("dc", "data"))
    for together in (False, True):
        program = jax.shard_map(
            functools.partial(step, together=together),
            mesh=mesh,
            in_specs=(by_device, P("dc")),
            out_specs=by_device,
            check_vma=False,
        )
        arguments = tree_of((mesh.size,), seed=0), tree_of((sites,), seed=1)
        programs.append(jax.jit(program).lower(*arguments))
    made = [program.compile()(*arguments) for program in programs]
    jax.tree.map(np.testing.assert_array_equal, *made)
    alone, together = (collective_traffic(program, mesh) for program in programs)
    assert alone.bytes_over("dc") == together.bytes_over("dc")
    assert len(alone.over("dc")) > 2 * len(together.over("dc"))


@pytest.mark.parametrize("wire", [None, INT8])
def test_only_what_crosses_crosses(mesh_of, wire):
    mesh = mesh_of(dc=2, data=2)

    def only(phase):
        def reduce(tree, before):
            started = start_all_reduce(tree, "data", "dc", wire=wire, error_feedback=before)
            if phase == "start":
                return jax.tree.leaves(started)
            return jax.tree.leaves(started.exchange())

        def step(tree, before):
            tree, before = jax.tree.map(lambda leaf: leaf[0], (tree, before))
            return [leaf.reshape(1, -1) for leaf in reduce(tree, before)]

        by_device = P(("dc", "data"))
        program = jax.shard_map(
            step, mesh=mesh, in_specs=(by_device, P("dc")), out_specs=by_device, check_vma=False
        )
        lowered = jax.jit(program).lower(tree_of((4,), seed=0), tree_of((2,), seed=1))
        return collective_traffic(lowered, mesh)

    assert only("start").bytes_over("dc") == 0
    assert only("start").bytes_over("data") == only("exchange").bytes_over("data") > 0
    assert only("exchange").bytes_over("dc") > 0
