"""The traffic of whole programs: literal text of each form, and what the collectives compile to."""

import doctest
import json
import math
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from geojax.collectives import all_gather, all_reduce, reduce_scatter
from geojax.errors import UserError
from geojax.hlo import HloParseError, collective_traffic
from geojax.hlo import traffic as traffic_module
from geojax.hlo.conventions import BYTES_SENT, all_reduce_bytes
from geojax.planner.program_traffic import program_traffic
from geojax.planner.traffic.collectives import predicted_all_reduce


def program(*lines, operands="%x = f32[8]{0} parameter(0)", before=""):
    body = "\n".join(f"  {line}" for line in (operands, *lines))
    header = "HloModule jit_f, num_partitions=8"
    return f"{header}\n{before}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.fixture
def mesh(mesh_of):
    return mesh_of(dc=2, data=4)


ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
PERMUTE = "collective-permute"
DATA = "replica_groups=[2,4]<=[8]"
ACROSS = "replica_groups=[4,2]<=[2,4]T(1,0)"
SENT_PAIRS = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}'


@pytest.mark.parametrize(
    ("line", "kind", "axes", "sent"),
    [
        ("f32[8] all-reduce(%x), replica_groups={{0,1},{2,3}}", ALL_REDUCE, ("data",), 32),
        ("f32[8] all-reduce(%x), replica_groups={}", ALL_REDUCE, ("dc", "data"), 56),
        ("f32[8] all-reduce(%x), replica_groups={{0},{1},{2}}", ALL_REDUCE, (), 0),
        (f"f32[8] all-reduce-start(%x), {ACROSS}", ALL_REDUCE, ("dc",), 32),
        (f"(f32[8], f32[8]) all-reduce-start(%x, %x), {ACROSS}", ALL_REDUCE, ("dc",), 64),
        (f"f32[2] reduce-scatter(%x), {DATA}", REDUCE_SCATTER, ("data",), 24),
        (
            f"((f32[8], f32[8]), (f32[2], /*index=1*/f32[2])) reduce-scatter-start(%x, %x), {DATA}",
            REDUCE_SCATTER,
            ("data",),
            48,
        ),
        (f"(f32[8], f32[32]) all-gather-start(%x), {DATA}", ALL_GATHER, ("data",), 96),
        (
            "f32[16] all-gather(%x), replica_groups=mesh['dc'=2,'data'=4] {'dc'}, dimensions={0}",
            ALL_GATHER,
            ("dc",),
            32,
        ),
        (
            "f32[16] all-gather(%x), replica_groups=mesh['a'=2,'b'=4], "
            "device_ids=([[0,4,1,5],[2,6,3,7]]) {'b':(2)2}, dimensions={0}",
            ALL_GATHER,
            ("dc",),
            32,
        ),
        (f"(f32[8], f32[8]) all-to-all(%x, %x), {ACROSS}", "all-to-all", ("dc",), 32),
        (
            "((f32[8]), f32[8]) all-to-all-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}",
            "all-to-all",
            ("data",),
            24,
        ),
        (
            "(f32[8], f32[8]) collective-permute-start(%x), source_target_pairs={{0,4},{1,5}}",
            PERMUTE,
            ("dc",),
            32,
        ),
        ("f32[8] collective-permute(%x), source_target_pairs={{0,0},{1,1}}", PERMUTE, (), 0),
        (f"(f32[8], u32[], token[]) send(%x, %t), {SENT_PAIRS}", PERMUTE, ("data",), 32),
        (f"f32[8] collective-broadcast(%x), {DATA}", "collective-broadcast", ("data",), 32),
    ],
)
def test_one_collective(mesh, line, kind, axes, sent):
    text = program("%t = token[] after-all()", f"ROOT %r = {line}, channel_id=1")
    (found,) = collective_traffic(text, mesh).collectives
    assert (found.kind, found.axes, found.bytes_sent) == (kind, axes, sent)
    assert (found.executions, found.in_loop, found.conditional) == (1, False, False)


def test_an_asynchronous_pair_counts_once(mesh):
    wrapped = """
%wrapped (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
}
"""
    text = program(
        "%start = ((f32[8]{0}), f32[2]{0}, s32[]) async-start(%x), calls=%wrapped",
        "%update = ((f32[8]{0}), f32[2]{0}, s32[]) async-update(%start), calls=%wrapped",
        "%done = f32[2]{0} async-done(%update), calls=%wrapped",
        "%ar = f32[2]{0} all-reduce-start(%done), replica_groups=[4,2]<=[2,4]T(1,0)",
        "ROOT %out = f32[2]{0} all-reduce-done(%ar)",
        before=wrapped,
    )
    kinds = [collective.kind for collective in collective_traffic(text, mesh).collectives]
    assert kinds == ["reduce-scatter", "all-reduce"]


def test_a_permute_is_listed_once_for_each_set_of_axes_it_crosses(mesh):
    pairs = "{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7}}"
    text = program(f"ROOT %r = f32[8]{{0}} collective-permute(%x), source_target_pairs={pairs}")
    traffic = collective_traffic(text, mesh)
    assert [c.axes for c in traffic.collectives] == [("data",), ("dc", "data")]
    assert traffic.bytes_over("dc") == 32


def test_both_branches_of_a_conditional_count_and_are_marked(mesh):
    branches = """
%yes (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %ar = f32[8]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%sum
}

%no (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %ar.1 = f32[8]{0} all-reduce(%p.1), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum
}
"""
    index = "%i = s32[] constant(0)"
    by_list = "ROOT %c = f32[8]{0} conditional(%i, %x, %x), branch_computations={%yes, %no}"
    named = "true_computation=%yes, false_computation=%no"
    by_name = by_list.replace("branch_computations={%yes, %no}", named)
    for line in (by_list, by_name):
        found = collective_traffic(program(index, line, before=branches), mesh).collectives
        assert [c.axes for c in found] == [("data",), ("dc",)]
        assert all(c.conditional for c in found)


def test_of_a_permute_those_with_a_target_send(mesh):
    pairs = "source_target_pairs={{0,4},{1,5},{2,3}}"
    text = program(f"ROOT %r = f32[8]{{0}} collective-permute(%x), {pairs}")
    traffic = collective_traffic(text, mesh)
    assert {each.axes: each.senders for each in traffic.collectives} == {("dc",): 2, ("data",): 1}
    assert (traffic.bytes_over("dc"), traffic.total_bytes_over("dc")) == (32, 64)


def test_groups_of_different_sizes_count_as_the_largest(mesh):
    text = program("ROOT %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2},{3},{4,5,6,7}}")
    (found,) = collective_traffic(text, mesh).collectives
    assert (found.ranks, found.axes, found.bytes_sent) == (4, ("data",), 48)


def test_bytes_are_exact_fractions():
    assert BYTES_SENT["all-reduce"](4, 3) == Fraction(16, 3)
    for kind, sent in BYTES_SENT.items():
        assert sent(1024, 1) == 0, f"{kind} in a group of one sends nothing"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"dc": 2, "data": 2}, "compiled for 8 devices and the mesh has 4")],
)
def test_another_mesh_is_refused(mesh_of, sizes, message):
    with pytest.raises(UserError, match=message):
        collective_traffic(program("ROOT %r = f32[8]{0} copy(%x)"), mesh_of(**sizes))


def test_an_unknown_axis_is_refused(mesh):
    traffic = collective_traffic(program("ROOT %r = f32[8]{0} copy(%x)"), mesh)
    assert traffic.collectives == ()
    with pytest.raises(UserError, match="no axis 'site'"):
        traffic.over("site")


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %r = f32[8]{0} all-reduce(%unknown), replica_groups={}",
        "ROOT %r = f32[8]{0} all-reduce(%x), replica_groups=[2,9]<=[8]",
        "ROOT %r = f32[8]{0} all-reduce(%x), replica_groups={{0,99}}",
        "ROOT %r = f32[8]{0} collective-permute(%x)",
    ],
)
def test_a_garbled_collective_is_a_parse_error(mesh, line):
    with pytest.raises(HloParseError, match=r"^HLO text: "):
        collective_traffic(program(line), mesh)


def test_the_example_of_the_docstring_holds():
    (example,) = doctest.DocTestFinder().find(
        collective_traffic, "collective_traffic", traffic_module, globs=vars(traffic_module)
    )
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 0
    assert result.failed == 0


def lower(mesh, step, *arguments, out_specs=None):
    out_specs = P() if out_specs is None else out_specs
    shard_mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=out_specs)
    return jax.jit(shard_mapped).lower(*arguments)


def test_loops_count_as_often_as_they_run(mesh):
    def step(x):
        def add_inside(total, _):
            return lax.pcast(lax.psum(total, "data"), "data", to="varying") / 4, None

        def outer(total, _):
            total, _ = lax.scan(add_inside, total, None, length=5)
            return total, lax.psum(total[0], ("dc", "data"))

        total, seen = lax.scan(outer, lax.pcast(x, ("dc", "data"), to="varying"), None, length=3)
        return lax.psum(total, ("dc", "data")), seen

    lowered = lower(mesh, step, jnp.ones(6, jnp.float32))
    for text in (lowered, lowered.compile()):
        sums = collective_traffic(text, mesh).sums()
        inside = sums["data",]["all-reduce"]
        assert (inside.count, inside.in_loop, inside.instructions) == (15, 1, 1)
        assert inside.bytes_sent == 15 * 36
        both = sums["dc", "data"]["all-reduce"]
        assert (both.count, both.in_loop, both.instructions) == (4, 1, 2)
        assert both.bytes_sent == Fraction(7, 4) * (3 * 4 + 24)


def test_a_loop_over_data_around_a_collective_counts_once_and_is_marked(mesh):
    def step(x, summed):
        def body(total):
            total = total + 1
            return lax.pmean(total, ("dc", "data")) if summed else total

        return lax.while_loop(lambda total: jnp.sum(total) < 100, body, x)

    traffic = collective_traffic(lower(mesh, lambda x: step(x, True), jnp.ones(4)), mesh)
    assert [(each.executions, each.at_least) for each in traffic.collectives] == [(1, True)]
    assert re.search(r"all-reduce +>=1 +1 of 1 +>=28$", str(traffic))
    (kinds,) = traffic.to_json()["axes"]
    assert kinds["kinds"]["all-reduce"]["at_least"] == 1
    known = collective_traffic(
        lower(mesh, lambda x: step(x, True), jnp.ones(4)), mesh, longest_loop=3
    )
    assert [(each.executions, each.at_least) for each in known.collectives] == [(3, False)]
    quiet = lower(mesh, lambda x: step(x, False), jnp.ones(4))
    assert collective_traffic(quiet.compile(), mesh).collectives == ()


LAYOUTS = {
    "2x4": ({"dc": 2, "data": 4}, ("data",)),
    "4x2": ({"dc": 4, "data": 2}, ("data",)),
    "3x2": ({"dc": 3, "data": 2}, ("data",)),
    "1x8": ({"dc": 1, "data": 8}, ("data",)),
    "8x1": ({"dc": 8, "data": 1}, ("data",)),
    "2x2x2": ({"dc": 2, "data": 2, "expert": 2}, ("data", "expert")),
}
TREE = {
    "scale": jax.ShapeDtypeStruct((1,), jnp.float32),
    "vector": jax.ShapeDtypeStruct((1001,), jnp.float32),
    "matrix": jax.ShapeDtypeStruct((30, 70), jnp.float32),
    "cube": jax.ShapeDtypeStruct((5, 8, 33), jnp.float32),
}
DIMS = {"scale": 0, "vector": 0, "matrix": 1, "cube": -1}


def varied(tree, inner):
    """Different numbers on every rank, so that no compiler can simplify a sum."""
    place = 1.0 + lax.axis_index(("dc", *inner)).astype(jnp.float32)
    return jax.tree.map(lambda x: x * place, tree)


@pytest.mark.parametrize(
    "bucket_bytes", [None, 2048, 1 << 20], ids=["unbucketed", "split", "merged"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_sent_is_what_the_formula_says(mesh_of, layout, bucket_bytes):
    sizes, inner = LAYOUTS[layout]
    mesh = mesh_of(**sizes)
    ranks = {"intra_ranks": mesh.size // sizes["dc"], "inter_ranks": sizes["dc"]}
    over_inner = tuple(axis for axis in inner if sizes[axis] > 1)

    def check(step, out, intra, inter):
        shard_mapped = jax.shard_map(
            lambda tree: step(varied(tree, inner)), mesh=mesh, in_specs=P(), out_specs=out
        )
        traced = jax.jit(shard_mapped).trace(TREE)
        counted, lowered = program_traffic(traced, mesh), traced.lower()
        for text in (lowered, lowered.compile()):
            traffic = collective_traffic(text, mesh)
            within = sum((c.bytes_sent for c in traffic.collectives if c.axes == over_inner), 0)
            assert traffic.by_axes == counted.by_axes
            assert (within, traffic.bytes_over("dc")) == (intra, inter)
            assert {c.axes for c in traffic.collectives} <= {("dc",), over_inner}, "no other axes"
            assert all(c.ranks > 1 for c in traffic.collectives), "nothing for an axis of one"

    whole = predicted_all_reduce(TREE, **ranks, bucket_bytes=bucket_bytes)
    check(
        lambda tree: all_reduce(tree, inner, "dc", bucket_bytes=bucket_bytes),
        P(),
        whole.intra,
        whole.inter,
    )
    shards = sum(
        4
        * math.prod(leaf.shape)
        // leaf.shape[DIMS[name]]
        * -(-leaf.shape[DIMS[name]] // ranks["intra_ranks"])
        for name, leaf in TREE.items()
    )
    second, last = P(None, inner), P(None, None, inner)
    check(
        lambda tree: reduce_scatter(tree, inner, "dc", dims=DIMS, bucket_bytes=bucket_bytes),
        {"scale": P(inner), "vector": P(inner), "matrix": second, "cube": last},
        (ranks["intra_ranks"] - 1) * shards,
        all_reduce_bytes(shards, sizes["dc"]),
    )


def test_the_formula_for_a_tree_that_divides_evenly():
    size, ranks, sites = 4 * 1024, 4, 2
    tree = jax.ShapeDtypeStruct((1024,), jnp.float32)
    whole = predicted_all_reduce(tree, intra_ranks=ranks, inter_ranks=sites)
    assert whole.intra == 2 * Fraction(ranks - 1, ranks) * size
    assert whole.inter == Fraction(2 * (sites - 1), sites) * size / ranks


def test_xla_for_cpus_merges_sums_and_keeps_their_bytes(mesh):
    lowered = lower(
        mesh,
        lambda x: all_reduce(varied(x, ("data",)), "data", "dc", bucket_bytes=1024),
        jnp.ones(1024, jnp.float32),
    )
    asked = collective_traffic(lowered, mesh).sums()["dc",]["all-reduce"]
    done = collective_traffic(lowered.compile(), mesh).sums()["dc",]["all-reduce"]
    assert (asked.count, done.count) == (4, 1)
    assert asked.bytes_sent == done.bytes_sent == 1024


def test_types_of_axes_of_size_one_cost_nothing(mesh_of):
    mesh = mesh_of(dc=1, data=4)
    everything = tuple(mesh.axis_names)

    def step(x):
        shards = reduce_scatter(x, ("data", "expert"), "dc", dims=0)
        whole = all_gather(shards, ("data", "expert"), dims=0, shapes=(6,), to="invarying")
        inner, outer = ("data", "expert", "context"), ("dc", "stage", "tensor")
        return all_reduce(x, inner, outer), lax.pcast(whole, "data", to="varying")

    rest = tuple(axis for axis in everything if axis != "dc")
    program = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P(everything), out_specs=(P(), P(rest)))
    )
    traffic = collective_traffic(program.lower(jnp.ones(24)).compile(), mesh)
    assert {c.axes for c in traffic.collectives} == {("data",)}


def test_the_table_and_the_json(mesh):
    def step(x):
        return all_reduce(varied(x, ("data",)), "data", "dc")

    traffic = collective_traffic(lower(mesh, step, jnp.ones((2048,), jnp.float32)), mesh)
    assert str(traffic).splitlines() == [
        "axes  collective      count  in loops  bytes sent by a device",
        "dc    all-reduce          1    0 of 1                   2,048",
        "data  all-gather          1    0 of 1                   6,144",
        "data  reduce-scatter      1    0 of 1                   6,144",
    ]
    record = json.loads(json.dumps(traffic.to_json()))
    assert record["mesh"] == dict(mesh.shape)
    assert record["axes"][0] == {
        "axes": ["dc"],
        "kinds": {"all-reduce": {"instructions": 1, "count": 1, "in_loop": 0, "bytes_sent": 2048}},
    }
