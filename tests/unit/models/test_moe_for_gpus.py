"""Mixtures compiled ahead of time for eight H100 GPUs."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from mixtures import block_inputs, block_specs, spread_blocks
from support.h100 import h100_devices, needs_cuda

from geojax.mesh import make_mesh
from geojax.models import ModelConfig
from geojax.models.parallel.parallelism import Parallelism
from geojax.runtime.xla_flags import CUSTOM_PRODUCTS_OPTIONS

# As geojax sets them (geojax.runtime.xla_flags), but for this program alone.
_OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    **CUSTOM_PRODUCTS_OPTIONS,
}
_HIDDEN = 2048
_STREAM = re.compile(rf"%(all-to-all-start[.\d]*) = \(\(bf16\[\d+,{_HIDDEN}\]")
_KERNEL = r'custom_call_target="mosaic_gpu_v2".*op_name="[^"]*/(grouped_product(?:_gradient)?)/'
_PRODUCT = re.compile(rf"= \S+ fusion\(.*calls=%(?:fused_computation\.)?gemm|{_KERNEL}")


def _between(lines, start):
    """The products that are scheduled between the start of a transfer and its end."""
    found = []
    for line in lines:
        if f"all-to-all-done(%{start})" in line:
            return found
        if product := _PRODUCT.search(line):
            found.append(product[1] or "gemm")
    raise AssertionError(f"{start} has no end")


@needs_cuda
def test_products_are_kernels_and_tokens_travel_beside_other_work():
    config = ModelConfig.load("deepseekmoe-16b").with_stacked_layers(2)
    assert config.hidden_size == _HIDDEN
    parallelism = Parallelism(expert=8)
    mesh = make_mesh(expert=8, devices=h100_devices(1, 1))
    arrays = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        block_inputs(config, 16, 4096, jnp.bfloat16),
        block_specs(config, parallelism),
    )
    lowered = spread_blocks(config, parallelism, mesh).lower(*arrays)
    hlo = lowered.compile(compiler_options=_OPTIONS).as_text()
    products = re.findall(_KERNEL, hlo)
    # Gate and up as one, and down, of the first exchange and of further ones, forwards and their
    # gradients; the further ones' gate and up once more backwards.
    assert products.count("grouped_product") == 2 * 2 + 2 * 2 + 1
    assert products.count("grouped_product_gradient") == 2 * 2
    beside = []
    for computation in hlo.split("\n\n"):
        lines = computation.splitlines()
        for place, line in enumerate(lines):
            if start := _STREAM.search(line):
                beside.append(_between(lines[place:], start[1]))
    # Of the first exchange: tokens beside the shared experts, gradients beside theirs both ways.
    assert sum("gemm" in found for found in beside) >= 3
    assert any("grouped_product_gradient" in found for found in beside if "gemm" in found)
