"""The collective in which sites exchange, chosen by platform in one place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.h100 import h100_devices, needs_cuda

from geojax.collectives import BFLOAT16, INT8, exchange, reduce_scatter
from geojax.hlo import collective_traffic
from geojax.hlo.module import parse_module
from geojax.hlo.replica_groups import parse_groups
from geojax.mesh import make_mesh
from geojax.planner.program_traffic import program_traffic
from geojax.runtime.platform import CPU, GPU, site_exchange
from geojax.runtime.xla_flags import gpu_compiler_options
from geojax.topology import Topology

WIRES = {"as they are": None, "bf16": BFLOAT16, "int8": INT8}
NUMBERS = 2**12


@pytest.mark.parametrize(
    ("platform", "sites", "messages", "chosen"),
    [
        (CPU, 2, False, "psum"),
        (GPU, 4, False, "psum"),
        (CPU, 2, True, "permute"),
        (GPU, 2, True, "all_gather"),
        (GPU, 3, True, "all_to_all"),
    ],
)
def test_the_platform_chooses(platform, sites, messages, chosen):
    assert site_exchange(platform, sites, messages=messages) == chosen


def program_on(mesh, wire):
    """A reduce-scatter in two buckets over two sites, and the shape of what it sums."""

    def step(x):
        whole = {"a": x[0, 0], "b": x[0, 1]}
        options = {"dims": 0, "bucket_bytes": 4 * NUMBERS, "wire": wire}
        return jax.tree.map(
            lambda shard: shard[None], reduce_scatter(whole, "data", "dc", **options)
        )

    by_device = P(("dc", "data"))
    program = jax.shard_map(step, mesh=mesh, in_specs=by_device, out_specs=P(None, "data"))
    shape = jax.ShapeDtypeStruct(
        (mesh.size, 2, NUMBERS), jnp.float32, sharding=NamedSharding(mesh, by_device)
    )
    return jax.jit(program).trace(shape)


@pytest.mark.parametrize("wire", [BFLOAT16, INT8], ids=["bf16", "int8"])
def test_a_gather_makes_the_bits_and_sends_the_bytes_of_a_permute(mesh_of, wire, monkeypatch):
    mesh = mesh_of(dc=2, data=2)
    numbers = np.random.default_rng(0).normal(size=(4, 2, NUMBERS)).astype(np.float32)
    made, sent = {}, {}
    for platform in (CPU, GPU):
        monkeypatch.setattr(exchange, "target_platform", lambda platform=platform: platform)
        traced = program_on(mesh, wire)
        program = traced.lower().compile()
        made[platform.name] = program(numbers)
        traffic = collective_traffic(program, mesh)
        assert traffic.by_axes == program_traffic(traced, mesh).by_axes
        sent[platform.name] = {each.kind: traffic.bytes_over("dc") for each in traffic.over("dc")}
    jax.tree.map(np.testing.assert_array_equal, made["cpu"], made["gpu"])
    of_a_rank = 2 * wire.message_bytes(NUMBERS // 2)
    assert sent["cpu"] == {"collective-permute": of_a_rank}
    assert sent["gpu"] == {"all-gather": of_a_rank}


@needs_cuda
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_compiled_for_gpus_the_sites_exchange_in_cliques_of_two(wire):
    """A permute would need one clique of all devices, or a flag that takes it apart."""
    topology = Topology.load("two-h100-sites")
    sites = tuple(site.model_copy(update={"hosts": 1}) for site in topology.sites)
    topology = topology.model_copy(update={"sites": sites})
    mesh = make_mesh(topology, dc=2, data=8, devices=h100_devices(sites=2, hosts=1))
    program = program_on(mesh, wire).lower().compile(compiler_options=gpu_compiler_options())
    assert "collective-permute" not in program.as_text()
    cliques = set()
    for computation in parse_module(program.as_text()).computations.values():
        for each in computation:
            if each.opcode.removesuffix("-start") in ("all-gather", "all-reduce"):
                groups = parse_groups(each.attributes["replica_groups"], mesh.size)
                cliques |= {tuple(group) for group in groups}
    assert cliques == {(device, device + 8) for device in range(8)}
