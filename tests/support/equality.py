"""The gradient half of the training step on a layout, and the same on one device without any."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from support import whole_state
from support.distances import assert_no_further_than, distances
from support.plans import step_plan_on
from support.small_models import LAYOUTS, drawn_parameters, make_batch, model_of

from geojax import make_mesh
from geojax.models import loss_sum
from geojax.models.frozen import mark_frozen, trained_part
from geojax.precision import policy
from geojax.step.batches import global_batch, sequences_of_process
from geojax.step.error_feedback import error_layouts
from geojax.step.program import batch_specs, signals_on_mesh
from geojax.step.state import TrainState, parameter_layouts
from geojax.step.update import mean_over_targets, site_sums, sum_over_sites


class Result(NamedTuple):
    """The loss of a batch and the gradient of each parameter."""

    loss: Any
    gradients: Any


class CompressedResult(NamedTuple):
    """A `Result` with gradients that were rounded between sites, and what keeps the rest."""

    loss: Any
    gradients: Any
    targets: Any
    """The number of tokens with a loss: the gradient's of the mean, the errors of the sum."""
    errors: Any
    """The error feedback after the step, of each site."""


@functools.cache
def setting(family, precision):
    """A model with its parameters, a batch, and a dropout key where the model has dropout."""
    model = model_of(family)
    return (
        model,
        drawn_parameters(model, policy(precision).master_dtype),
        make_batch(model),
        jax.random.key(7) if model.dropout else None,
    )


def on_one_device(model, parameters, batch, dropout_key, compiler_options=None):
    """Loss and gradient of the whole batch on one device, without a mesh or a collective."""

    def mean(parameters):
        loss, count = loss_sum(parameters, batch, model, dropout_key=dropout_key)
        return loss / count

    program = jax.jit(jax.value_and_grad(mean), compiler_options=compiler_options)
    return Result(*program(parameters))


def in_float64(model, parameters, batch, dropout_key, compiler_options=None):
    """The same with the same weights in float64, on the host."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters)
    with jax.enable_x64():
        return jax.device_get(on_one_device(model, wide, batch, dropout_key, compiler_options))


@functools.cache
def reference(family, precision):
    """Loss and gradient on one device."""
    return on_one_device(*setting(family, precision))


@functools.cache
def exact_reference(family):
    """Loss and gradient of the weights of fp32 in float64, and how far one device's are from it."""
    exact = in_float64(*setting(family, "fp32"))
    return exact, distances(reference(family, "fp32"), exact)


def on_layout(family, precision, axes, microbatches, **options):
    """The same through the gradient half of the training step."""
    model, parameters, batch, dropout_key = setting(family, precision)
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    plan = step_plan_on(mesh, policy(precision), microbatches, **options)
    return gradients_of_step(model, parameters, batch, dropout_key, plan)


def sums_of_step(
    shards,
    batch,
    signals,
    *,
    loss_scale=None,
    amax_history=None,
    error_feedback=None,
    **arguments,
):
    """The sums over all sites of a step, inside a `shard_map`, without optimizer and counters."""
    state = TrainState(
        step=None,
        parameters=shards,
        optimizer=None,
        skipped=None,
        skipped_in_a_row=None,
        loss_scale=loss_scale,
        amax_history=amax_history,
        error_feedback=error_feedback,
    )
    return sum_over_sites(site_sums(state, batch, signals, **arguments), arguments["plan"])


def gradients_of_step(
    model, parameters, batch, dropout_key, plan, compiler_options=None, inspect=lambda text: None
):
    """Loss and gradient of a batch through the gradient half of the training step.

    Of frozen weights there is no gradient. `inspect` is given the text of the compiled program.
    """
    made = _run(model, parameters, batch, dropout_key, plan, None, compiler_options, inspect)
    return Result(made.loss, made.gradients)


def gradients_and_errors(
    model, parameters, batch, dropout_key, plan, errors, compiler_options=None
):
    """The same with gradients that are rounded between sites.

    `errors` are those of steps before: a tree like `error_layouts`, whole, on the host.
    """
    return _run(
        model, parameters, batch, dropout_key, plan, errors, compiler_options, lambda text: None
    )


def _run(model, parameters, batch, dropout_key, plan, errors, compiler_options, inspect):
    layouts = parameter_layouts(model, plan)
    trained = trained_part(layouts)
    error_places = error_layouts(trained, plan) if errors is not None else None
    specs, gradient_specs, error_specs = (
        jax.tree.map(lambda place: place.spec(), tree) for tree in (layouts, trained, error_places)
    )

    def gradients_and_metrics(shards, rows, signals, errors):
        sums = sums_of_step(
            shards,
            rows,
            signals,
            layouts=layouts,
            model=model,
            plan=plan,
            dropout_key=dropout_key,
            error_feedback=errors,
        )
        return *mean_over_targets(sums), sums.error_feedback

    program = jax.shard_map(
        gradients_and_metrics,
        mesh=plan.mesh,
        in_specs=(specs, batch_specs(batch, plan), plan.signal_spec, error_specs),
        out_specs=(gradient_specs, PartitionSpec(), error_specs),
        check_vma=True,
    )

    shards = whole_state.place(mark_frozen(model, parameters), layouts, plan.mesh)
    if errors is not None:
        errors = whole_state.place(errors, error_places, plan.mesh)
    count = len(batch["row"])
    share = sequences_of_process(plan, count)
    rows = global_batch(plan, count, share, {name: leaf[share] for name, leaf in batch.items()})
    signals = jnp.zeros(signals_on_mesh(plan).shape)
    compiled = jax.jit(program).lower(shards, rows, signals, errors).compile(compiler_options)
    inspect(compiled.as_text())
    gradients, metrics, errors = compiled(shards, rows, signals, errors)
    loss = metrics["loss"] + metrics.get("mtp_loss", 0) + metrics.get("aux_loss", 0)
    if jax.process_count() > 1:
        gradients = whole_state.trim(gradients, trained, plan.mesh)
    else:
        gradients = jax.tree.map(jnp.asarray, whole_state.on_host(gradients, trained))
    after = None if errors is None else whole_state.on_host(errors, error_places)
    return CompressedResult(loss, gradients, metrics["targets"], after)


def assert_equal_gradients(actual, expected, tolerance, zero_leaves=()):
    """Each leaf within `tolerance` of its largest entry; `zero_leaves` are zero in exact arithmetic
    and hold nothing but rounding noise, which is compared with the largest gradient of all."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))

    def compare(path, leaf, wanted):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        wanted = np.asarray(wanted)
        for shard in leaf.addressable_shards:  # with several processes, those of this one
            value, part = np.asarray(shard.data), wanted[shard.index]
            if name in zero_leaves:
                noise = 10 * np.finfo(value.dtype).eps * largest
                assert max(np.abs(value).max(), np.abs(part).max()) <= noise, f"{name} is not zero"
                continue
            error = np.abs(value - part).max() / np.abs(wanted).max()
            assert error <= tolerance, f"{name}: {error:.2e} of the largest"

    jax.tree_util.tree_map_with_path(compare, actual, expected)


def check_layout(family, precision, name, **options):
    """Loss and every gradient leaf of a layout against one device, in fp64 or fp32."""
    axes, microbatches = LAYOUTS[name]
    with jax.enable_x64(precision == "fp64"):
        made = on_layout(family, precision, axes, microbatches, bucket_bytes=4096, **options)
        if precision == "fp32":
            exact, one_device = exact_reference(family)
            assert_no_further_than(one_device, distances(made, exact))
            return
        loss, gradients = reference(family, precision)
        assert abs(float(made.loss) - float(loss)) <= 1e-10 * abs(float(loss))
        # Softmax does not see what a key bias adds to all scores of a query alike.
        zero = ("layers.attention.key.bias",) if family == "gpt3" else ()
        assert_equal_gradients(made.gradients, gradients, 1e-10, zero)
