"""Sums over sites in wire formats: their bits, their errors, their bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from geojax.collectives import BFLOAT16, FLOAT32, INT8, all_reduce, reduce_scatter
from geojax.hlo import collective_traffic
from geojax.mesh import make_mesh
from geojax.planner.program_traffic import program_traffic
from geojax.planner.traffic.collectives import predicted_all_reduce

WIRES = {"fp32": FLOAT32, "bf16": BFLOAT16, "int8": INT8}
SHAPES = {"scale": (1,), "vector": (20011,), "matrix": (130, 700)}
DIMS = {"scale": 0, "vector": 0, "matrix": 1}
RANKS, BUCKET_BYTES, TIMES = 2, 2**19, 20
# All of the messages below are of numbers of about this size; a block's largest is 4 at most.
HALF_STEP = {"fp32": 4 * 2.0**-25, "bf16": 4 * 2.0**-9, "int8": 4 / 127 / 2}

pytestmark = pytest.mark.usefixtures("float64")


def numbers(leading, seed=0):
    """Between -1 and 1."""
    generator = np.random.default_rng(seed)
    return {name: generator.uniform(-1, 1, (*leading, *shape)) for name, shape in SHAPES.items()}


def shard_shapes():
    return {
        name: (*shape[: DIMS[name]], -(-shape[DIMS[name]] // RANKS), *shape[DIMS[name] + 1 :])
        for name, shape in SHAPES.items()
    }


@functools.cache
def compiled(sites, wire_name, feedback):
    """(mesh, the traced program, the compiled one) of both sums: of each device's own numbers, and
    errors if there is feedback."""
    mesh = make_mesh(devices=jax.devices()[: sites * RANKS], dc=sites, data=RANKS)
    options = {"bucket_bytes": BUCKET_BYTES, "wire": WIRES[wire_name]}

    def first(tree):
        return jax.tree.map(lambda x: x[0], tree)

    def step(tree, whole_errors, shard_errors):
        doubled = jax.tree.map(lambda x: 2 * x, first(tree))  # equal messages would become one
        if not feedback:
            whole = all_reduce(first(tree), "data", "dc", **options)
            shards = reduce_scatter(doubled, "data", "dc", dims=DIMS, **options)
            rounded = rounded_shards = None
        else:
            whole, rounded = all_reduce(
                first(tree), "data", "dc", error_feedback=first(whole_errors), **options
            )
            shards, rounded_shards = reduce_scatter(
                doubled, "data", "dc", dims=DIMS, error_feedback=first(shard_errors), **options
            )
        made = (rounded, shards, rounded_shards)
        return whole, *(jax.tree.map(lambda x: x[None], tree) for tree in made)

    by_device = P(("dc", "data"))
    program = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(by_device, P("dc"), by_device),
        out_specs=(P(), P("dc"), P("data"), by_device),
    )

    def zeros(leading, shapes):
        return {name: np.zeros((leading, *shape)) for name, shape in shapes.items()}

    start = zeros(sites, SHAPES), zeros(mesh.size, shard_shapes())
    traced = jax.jit(program).trace(numbers((mesh.size,)), *start)
    return mesh, traced, traced.lower().compile(), start


def run(sites, wire_name, feedback, times, summand):
    """The sums of `times` times, added up, and the errors after them."""
    _, _, program, errors = compiled(sites, wire_name, feedback)
    totals = None
    for time in range(times):
        whole, rounded, shards, rounded_shards = program(summand(time), *errors)
        if feedback:
            errors = rounded, rounded_shards
        made = jax.tree.map(np.asarray, (whole, shards))
        totals = made if totals is None else jax.tree.map(np.add, totals, made)
    return totals, errors


def as_shards(tree):
    """[RANKS, block, ...] of whole leaves, padded as the shards are."""

    def split(name, leaf):
        dim = DIMS[name]
        widths = [(0, -leaf.shape[dim] % RANKS if axis == dim else 0) for axis in range(leaf.ndim)]
        return np.stack(np.split(np.pad(leaf, widths), RANKS, axis=dim))

    return {name: split(name, leaf) for name, leaf in tree.items()}


@pytest.mark.parametrize(
    ("sites", "wire_name"), [(2, "int8"), (3, "int8"), (3, "bf16"), (2, "fp32")]
)
def test_all_sites_have_the_same_bits_and_they_are_near_the_sum(sites, wire_name):
    mesh, _, program, errors = compiled(sites, wire_name, wire_name == "int8")
    x = numbers((mesh.size,))
    whole, _, shards, _ = program(x, *errors)
    for leaf in jax.tree.leaves((whole, shards)):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in copies.values():
            assert len(others) >= sites - 1
            for other in others:
                np.testing.assert_array_equal(other, first)
    exact = {name: leaf.sum(0) for name, leaf in x.items()}
    bound = (sites + 1) * max(1, sites * RANKS / 4) * HALF_STEP[wire_name]
    for name, wanted in as_shards(exact).items():
        assert np.abs(whole[name] - exact[name]).max() <= bound
        assert np.abs(shards[name] - 2 * wanted).max() <= 2 * bound
        assert not np.array_equal(shards[name], 2 * wanted) or name == "scale"


@pytest.mark.parametrize("sites", [2, 3])
def test_what_is_not_in_the_sums_is_in_the_errors(sites):
    devices = sites * RANKS
    (whole, shards), (rounded, rounded_shards) = run(
        sites, "int8", True, 4, lambda time: numbers((devices,), seed=time)
    )
    x = [numbers((devices,), seed=time) for time in range(4)]
    exact = {name: sum(each[name].sum(0) for each in x) for name in SHAPES}
    for name, wanted in as_shards(exact).items():
        assert np.abs(rounded[name]).max() > 0
        np.testing.assert_allclose(whole[name] + rounded[name].sum(0), exact[name], atol=1e-12)
        by_rank = np.asarray(rounded_shards[name]).reshape(sites, RANKS, *wanted.shape[1:])
        np.testing.assert_allclose(shards[name] + by_rank.sum(0), 2 * wanted, atol=1e-12)


def test_with_feedback_the_mean_of_the_sums_converges_and_without_it_stays_wrong():
    x = numbers((2 * RANKS,))
    exact = {name: leaf.sum(0) for name, leaf in x.items()}

    def wrong(feedback, times):
        (whole, shards), _ = run(2, "int8", feedback, times, lambda time: x)
        parts = as_shards(exact)
        off = [np.abs(whole[name] / times - exact[name]).mean() for name in ("vector", "matrix")]
        off += [np.abs(shards[name] / times - 2 * parts[name]).mean() for name in ("vector",)]
        return np.array(off)

    once, often = wrong(feedback=True, times=1), wrong(feedback=True, times=TIMES)
    assert (often < 2.5 * once / TIMES).all(), "the error of a mean of n falls as 1/n"
    np.testing.assert_allclose(wrong(feedback=False, times=TIMES), once, rtol=1e-9)


@pytest.mark.parametrize(
    ("sites", "wire_name"), [(2, "int8"), (3, "int8"), (3, "bf16"), (2, "fp32")]
)
def test_nothing_widens_the_bytes_of_a_wire_format(sites, wire_name):
    mesh, traced, program, _ = compiled(sites, wire_name, wire_name == "int8")
    counted = program_traffic(traced, mesh)
    assert collective_traffic(program, mesh).by_axes == counted.by_axes
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float64) for name, shape in SHAPES.items()}
    ranks = {"intra_ranks": RANKS, "inter_ranks": sites, "bucket_bytes": BUCKET_BYTES}
    wire, plain = (
        predicted_all_reduce(tree, **ranks, wire=each).inter for each in (WIRES[wire_name], None)
    )
    # Both sums send alike, but for the padding of their shards.
    assert float(counted.bytes_over("dc")) == pytest.approx(float(2 * wire), rel=0.01)
    share = float(counted.bytes_over("dc") / (2 * plain))  # of 8 bytes a number
    least = {"fp32": 4 / 8, "bf16": 2 / 8, "int8": (1 + 4 / 256) / 8}[wire_name]
    assert least <= share < 1.03 * least, "a little more where a message is not of whole blocks"


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("scattered", [False, True], ids=["whole", "scattered"])
def test_the_bits_of_int8_do_not_depend_on_the_buckets(mesh_of, sites, scattered):
    """Blocks begin at each leaf, whatever shares its bucket and wherever it is split."""
    mesh = mesh_of(dc=sites, data=RANKS)
    tree = {name: leaf.astype(np.float32) for name, leaf in numbers((mesh.size,)).items()}

    def summed(bucket_bytes):
        def step(own):
            own = jax.tree.map(lambda x: x[0], own)
            options = {"bucket_bytes": bucket_bytes, "wire": INT8}
            if scattered:
                made = reduce_scatter(own, "data", "dc", dims=DIMS, **options)
            else:
                made = all_reduce(own, "data", "dc", **options)
            return jax.tree.map(lambda x: x[None], made)

        by_device = P(("dc", "data"))
        out = P("data") if scattered else P()
        program = jax.shard_map(step, mesh=mesh, in_specs=by_device, out_specs=out)
        return jax.jit(program)(tree)

    alone = summed(None)
    for bucket_bytes in (2**15, 2**17, 2**22):
        jax.tree.map(np.testing.assert_array_equal, summed(bucket_bytes), alone)
