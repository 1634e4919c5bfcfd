"""H100 GPUs that this machine need not have, to compile programs for."""

import importlib.util

import pytest

from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.compile_target import gpus
from geojax.runtime.compilation import without_compilation_cache
from geojax.runtime.xla_flags import gpu_compiler_options
from geojax.step.program import lower_step
from geojax.step.state import state_layouts

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


def compiled_step(model, plan, batch):
    """The program of a step, and the layouts of its state; `batch` is of `batch_shape`."""
    settings = OptimizerSettings()
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    lowered = lower_step(layouts, model, plan, optimizer, schedule, batch)
    with without_compilation_cache():
        return lowered.compile(gpu_compiler_options() | (plan.compiler_options or {})), layouts
