"""Adapters through a step: gradients of nothing else, and nothing else sent, held or updated."""

import functools
import math

import jax
import numpy as np
from support.adapters import adapted_parameters
from support.pipelines import QUICK
from support.plans import step_plan_on
from support.small_models import ROWS, SEQUENCE, make_batch, model_of
from support.step_traffic import sends_as_counted

from geojax import make_mesh
from geojax.collectives import INT8
from geojax.models import loss_sum, parameter_count, parameter_shapes
from geojax.models.frozen import mark_frozen, split_trained, unmarked
from geojax.models.lora import merge_adapters
from geojax.optim import OptimizerSettings
from geojax.planner.memory import TracedStep
from geojax.precision import policy
from geojax.step.plan import SIGNALS
from geojax.step.program import batch_shape
from geojax.step.state import parameter_layouts

LORA = {"rank": 4, "alpha": 6.0}
CUBE = {"dc": 2, "data": 2, "tensor": 2}


def adapted(model):
    return model.replace(lora=LORA, dropout=0.0)


LLAMA, GPT3 = (adapted(model_of(family)) for family in ("llama", "gpt3"))


def plan_on(axes, precision="fp64", microbatches=1, **options):
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    return step_plan_on(mesh, policy(precision), microbatches, **options)


@functools.cache
def reference(model):
    """Parameters, and loss and gradients of the adapters by `jax.grad` on one device."""
    parameters = adapted_parameters(model, np.float64)
    split = split_trained(mark_frozen(model, parameters))

    def mean(adapters):
        loss, count = loss_sum(
            unmarked(split.merge(adapters)), make_batch(model, sequence=16), model
        )
        return loss / count

    program = jax.jit(jax.value_and_grad(mean), compiler_options=QUICK)
    return parameters, *program(split.trained)


def test_merged_weights_compute_the_same():
    with jax.enable_x64(True):
        parameters, loss, _ = reference(GPT3)
        merged = merge_adapters(parameters, GPT3.lora)
        assert jax.tree.structure(merged) == jax.tree.structure(parameter_shapes(GPT3.base))
        total, count = loss_sum(merged, make_batch(GPT3, sequence=16), GPT3.base)
        assert abs(float(total / count) - float(loss)) <= 1e-12 * float(loss)


def test_only_adapters_cross_and_the_rest_is_gathered_in_the_site():
    plan = plan_on(CUBE, "fp32", zero_stage=3)
    sent = sends_as_counted(LLAMA, plan, ROWS, SEQUENCE).by_axes
    # The ranks of `data` and `tensor` each send a quarter of all adapters, and get one.
    adapters = parameter_count(LLAMA) - parameter_count(LLAMA.base)
    assert sent["dc",] == 4 * (adapters / 4 + 2 + len(SIGNALS))
    base = [leaf for leaf in jax.tree.leaves(parameter_layouts(LLAMA.base, plan)) if leaf.shard]
    gathered = sum(math.prod(leaf.shard_shape) for leaf in base)
    assert sent["data",] > 4 * 2 * gathered, "every pass gathers the other rank's half"


def test_compressed_adapters_are_counted_byte_for_byte():
    options = {"zero_stage": 2, "overlap_grad_reduce": True, "wire_format": INT8}
    plan = plan_on({"dc": 2, "data": 2}, "bf16", **options)
    sends_as_counted(LLAMA, plan, ROWS, SEQUENCE)


def test_frozen_weights_have_no_moments_and_no_gradients():
    plan = plan_on({"dc": 2, "data": 2}, "bf16")
    settings, batch = OptimizerSettings(), batch_shape(ROWS, SEQUENCE)
    step = TracedStep.of(GPT3, plan, settings, 10, batch)
    base = parameter_count(GPT3.base)
    adapters = parameter_count(GPT3) - base
    held = step.memory.phases["update"]
    padding = 1.1
    assert 2 * base / 2 <= held["frozen weights"] <= padding * 2 * base / 2
    assert 4 * adapters / 2 <= held["master weights"] <= padding * 4 * adapters / 2
    assert 8 * adapters / 2 <= held["optimizer moments"] <= padding * 8 * adapters / 2
    dense = TracedStep.of(GPT3.base, plan, settings, 10, batch).memory
    most = max(phase["gradients"] for phase in step.memory.phases.values())
    assert most < 0.7 * max(phase["gradients"] for phase in dense.phases.values())
