"""Streams of a loop with tensor parallelism that reduces gradients inside and between sites.

Compiled ahead of time for 256 H100s; docs/records/xla-collective-options.md shows the results.
"""

import types

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.h100 import needs_cuda

from geojax.collectives import BFLOAT16
from geojax.collectives.exchange import SiteSum
from geojax.planner.compile_target import gpus
from geojax.planner.compiled_step import CompiledProgram
from geojax.runtime.platform import GPU
from geojax.runtime.xla_flags import MULTI_STREAM_OPTIONS

LAYERS, ROWS, HIDDEN, FFN = 8, 4096, 8192, 4096
AXES = {"dc": 2, "data": 16, "tensor": 8}
DOMAINS = {"xla_gpu_collective_domain_assignment": "scale_up_fabric"}
LIMIT = "xla_gpu_experimental_parallel_scale_up_collective_overlap_limit"

needs_domains = pytest.mark.skipif(
    tuple(map(int, jaxlib.__version__.split(".")[:3])) < (0, 11, 2),
    reason="XLA has domains of collectives from jaxlib 0.11.2 on",
)


def device_loop(own_stream):
    """Layers whose gradients are scattered in the site, and a turn later summed over sites."""

    def run(x, ups, downs):
        def layer(carry, weights):
            x, gradient, shard = carry
            up, down = weights
            rows = lax.all_gather(x, "tensor", axis=0, tiled=True)
            wide = rows @ up
            x = lax.psum_scatter(wide @ down, "tensor", scatter_dimension=0, tiled=True)
            in_site = lax.psum_scatter(gradient, "data", scatter_dimension=0, tiled=True)
            over_sites = SiteSum.start(shard, ("dc",), BFLOAT16, keep_error=False)
            total = over_sites.exchange(own_stream=own_stream).done().total
            return (x, (rows.T @ wide).astype(jnp.float32), in_site), total

        def zeros(*shape):
            return lax.pcast(jnp.zeros(shape, jnp.float32), tuple(AXES), to="varying")

        start = x, zeros(HIDDEN, FFN), zeros(HIDDEN // AXES["data"], FFN)
        (x, _, _), totals = lax.scan(layer, start, (ups, downs))
        return x, totals

    return run


def messages(options, *, own_stream, hosts_per_nvlink=1):
    """The loop's messages by axes and kind, and its temporary memory."""
    devices = gpus(2, 16, 8, hosts_per_nvlink=hosts_per_nvlink)
    mesh = Mesh(np.array(devices).reshape(tuple(AXES.values())), tuple(AXES))
    rows = P(tuple(AXES))
    specs = rows, P(None, None, "tensor"), P(None, "tensor")
    step = jax.jit(
        jax.shard_map(
            device_loop(own_stream),
            mesh=mesh,
            in_specs=specs,
            out_specs=(rows, P(None, "data", "tensor")),
        )
    )
    ffn = FFN * AXES["tensor"]
    shapes = (
        (ROWS * 2 * AXES["data"], HIDDEN),
        (LAYERS, HIDDEN, ffn),
        (LAYERS, ffn, HIDDEN),
    )
    arguments = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    no_pipeline = {"staged_layers": None, "tick_program": None}
    plan = types.SimpleNamespace(mesh=mesh, compiler_options=None, **no_pipeline)
    traced = types.SimpleNamespace(platform=GPU, plan=plan, lowered=step.lower(*arguments))
    compiled = CompiledProgram.of(traced, options)
    made = {(",".join(each.axes), each.kind): each for each in compiled.messages(plan)}
    return made, compiled.program.memory_analysis().temp_size_in_bytes


DC = "dc", "all-gather"
DATA = "data", "reduce-scatter"
GATHER, SCATTER = ("tensor", "all-gather"), ("tensor", "reduce-scatter")


def streams(made):
    """The one stream of each kind of message."""
    return {kind: next(iter(made[kind].streams)) for kind in (DC, DATA, GATHER, SCATTER)}


def together(made):
    return {kind: set(made[kind].together) for kind in (DC, DATA, GATHER, SCATTER)}


@needs_cuda
def test_an_annotated_sum_over_sites_has_a_stream_of_its_own():
    made, _ = messages({}, own_stream=False)
    assert streams(made) == {DC: "0", DATA: "0", GATHER: "0", SCATTER: "0"}
    assert not any(together(made).values())
    made, _ = messages({}, own_stream=True)
    assert streams(made) == {DC: "2", DATA: "0", GATHER: "0", SCATTER: "0"}
    assert together(made) == {DC: {"data", "tensor"}, DATA: {"dc"}, GATHER: {"dc"}, SCATTER: {"dc"}}


@needs_cuda
@needs_domains
@pytest.mark.parametrize("options", [DOMAINS, {**DOMAINS, LIMIT: 16}])
def test_domains_of_hosts_do_not_part_the_two_phases(options):
    """A reduce-scatter over hosts leaves NVLink, as the sum over sites does: one domain."""
    made, with_domains = messages(options, own_stream=False)
    assert streams(made) == {DC: "0", DATA: "0", GATHER: "3", SCATTER: "3"}
    assert together(made) == {
        DC: {"tensor"},
        DATA: {"tensor"},
        GATHER: {"dc", "data"},
        SCATTER: {"dc", "data"},
    }
    assert with_domains == messages({}, own_stream=False)[1]


@needs_cuda
@needs_domains
def test_domains_beside_an_annotated_sum_make_three_streams():
    made, _ = messages({**DOMAINS, LIMIT: 16}, own_stream=True)
    assert streams(made) == {DC: "2", DATA: "0", GATHER: "3", SCATTER: "3"}
    assert together(made)[DATA] == {"dc", "tensor"}


@needs_cuda
@needs_domains
def test_domains_of_sites_part_the_two_phases_but_share_a_stream_with_tensor_ranks():
    made, _ = messages({**DOMAINS, LIMIT: 16}, own_stream=False, hosts_per_nvlink=16)
    assert streams(made) == {DC: "0", DATA: "3", GATHER: "3", SCATTER: "3"}
    assert together(made)[DATA] == {"dc"}
    # With the default limit of 1 the compute waits for the gathers.
    made, _ = messages(DOMAINS, own_stream=False, hosts_per_nvlink=16)
    assert streams(made) == {DC: "0", DATA: "3", GATHER: "compute", SCATTER: "3"}
    assert not made[DC].bytes_beside_compute


@needs_cuda
def test_multi_streaming_puts_the_link_on_a_stream_with_tensor_ranks():
    made, _ = messages(MULTI_STREAM_OPTIONS, own_stream=False)
    assert streams(made) == {DC: "0", DATA: "1", GATHER: "1", SCATTER: "0"}
    assert together(made)[DATA] == {"dc", "tensor"}


@needs_cuda
@needs_domains
def test_the_limit_alone_changes_nothing():
    made, _ = messages({LIMIT: 16}, own_stream=False)
    assert set(streams(made).values()) == {"0"}
