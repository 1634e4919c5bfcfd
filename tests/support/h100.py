"""H100 GPUs that this machine need not have, to compile programs for."""

import importlib.util

import pytest

from geojax.models import ModelConfig
from geojax.planner.compile_target import gpus

# XLA's compiler for GPUs is in the extra `aot`, with gigabytes of NVIDIA's libraries.
needs_cuda = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax[cuda13]"
)


def h100_devices(sites, hosts, per_host=8):
    """The devices of `sites` times `hosts` hosts."""
    return gpus(sites, hosts, per_host)


def small_llama(layers):
    """Llama 3 with few and narrow layers, which compile soon."""
    return ModelConfig.load("llama3-8b").replace(
        num_hidden_layers=layers,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8192,
    )
