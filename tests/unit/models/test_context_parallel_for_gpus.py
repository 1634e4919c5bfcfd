"""Context parallelism compiled ahead of time for eight H100 GPUs."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from spread_rows import ROW_SPEC, SPEC, output_and_gradients
from support.h100 import h100_devices, needs_cuda

from geojax.mesh import make_mesh
from geojax.models.attention.cudnn.packed import CAPACITIES
from geojax.models.parallel.parallelism import Parallelism


def compiled(method, packed):
    """The HLO of rows of 16,384 positions, forwards and backwards, in the order of its schedule."""
    mesh = make_mesh(context=8, devices=h100_devices(1, 1))
    parallelism = Parallelism(context=8, context_method=method)

    def local(*operands):
        return output_and_gradients(*operands, parallelism=parallelism)

    program = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(SPEC, SPEC, SPEC, SPEC, ROW_SPEC if packed else None),
        out_specs=(SPEC,) * 4,
    )

    def array(spec, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    query, key = (array(SPEC, 1, 16384, heads, 128) for heads in (16, 8))
    segment_ids = array(ROW_SPEC, 1, 16384, dtype=jnp.int32) if packed else None
    lowered = jax.jit(program).lower(query, key, key, query, segment_ids)
    # As geojax sets them (geojax.runtime.xla_flags), but for this program alone.
    options = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    }
    return lowered.compile(compiler_options=options).as_text()


def kernels_and_transfers(hlo):
    """By computation, the kernels of attention and the ends of its transfers, as scheduled."""
    found, name = {}, None
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line
        kind = re.search(r" (collective-permute-start|collective-permute-done)\(|\$(fmha)", line)
        if kind:
            found.setdefault(name, []).append((kind[1] or kind[2]).removeprefix("collective-"))
    return found


@needs_cuda
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("method", "kernels", "causal"), [("ring", 8, 2), ("all_gather", 8, 4), ("ulysses", 2, 2)]
)
def test_the_fused_kernel_is_kept(method, kernels, causal, packed):
    hlo = compiled(method, packed)
    if packed:  # one for each number of segments, besides that for one
        kernels += len(CAPACITIES) * causal
    assert hlo.count('custom_call_target="__cudnn$fmha') == kernels
    if method != "ring":
        return
    bodies = [order for name, order in kernels_and_transfers(hlo).items() if name[:5] != "ENTRY"]
    steps = [[kind for kind, _ in itertools.groupby(body)] for body in bodies if len(body) > 1]
    assert steps == [["permute-start", "fmha", "permute-done"]] * 2  # forwards and backwards
