"""H100 GPUs that this machine need not have, to compile programs for."""

import importlib.util

import pytest

# XLA's compiler for GPUs is in the extra `aot`, with gigabytes of NVIDIA's libraries.
needs_cuda = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax[cuda13]"
)

H100_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  runtime_version: "13.0.0" driver_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100_devices(sites, hosts, per_host=8):
    """The devices of `sites` times `hosts` hosts."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        "h100", platform="cuda", target_config=H100_TARGET, topology=f"{sites}x{hosts}x{per_host}"
    ).devices
