"""H100 GPUs that this machine need not have, to compile programs for."""

import importlib.util

import pytest

from geojax.planner.compile_target import gpus

# XLA's compiler for GPUs is in the extra `aot`, with gigabytes of NVIDIA's libraries.
needs_cuda = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax[cuda13]"
)


def h100_devices(sites, hosts, per_host=8):
    """The devices of `sites` times `hosts` hosts."""
    return gpus(sites, hosts, per_host)
