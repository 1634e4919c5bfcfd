"""Loss and gradients of a `Case`, and how far each leaf is from one device's.

One device computes the whole batch in one piece by `jax.value_and_grad` of the model's loss, on no
mesh and without a collective. Under an FP8 recipe it takes one microbatch after the other, as many
as there are pieces of the batch with a scale of their own on the layout.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from equality.case import FP8_GROUPS, ROWS, SEQUENCE, Case
from support.collective_order import unordered_collectives
from support.distances import distances
from support.equality import Result, gradients_and_errors, gradients_of_step
from support.islands import SEED, data_islands, shares, site_plans, stage_islands, step_all
from support.plans import step_plan_on
from support.small_models import make_batch

from geojax import make_mesh
from geojax.models import ModelConfig, loss_sum
from geojax.models.frozen import mark_frozen, split_trained, trained_part, unmarked
from geojax.models.parameters import parameter_shapes
from geojax.optim import OptimizerSettings
from geojax.step.error_feedback import error_layouts
from geojax.step.state import parameter_layouts

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Each program runs once: what is spent on its machine code is lost. (XLA's passes stay.)"""

DRAWS = 6
"""Weights in fp32, equal but for their last bits, whose errors on one device are a bound."""

SPREAD = {np.dtype(np.float64): 0.3, np.dtype(np.float32): 0.1}
"""Standard deviation of the weights by their dtype.

With large ones a softmax is nearly a maximum, and its gradient hangs on the last bits of the
scores: 1e-6 of the weights is 1e-4 of the gradient, which float64 does not mind."""

RATE = 1e3
DESCENT = OptimizerSettings(
    name="sgd",
    beta1=0.0,
    weight_decay=0.0,
    clip_norm=None,
    schedule="constant",
    warmup_steps=0,
    peak_learning_rate=RATE,
)
"""Of islands, whose gradients are read off an update that is large beside the weights."""


def errors(case: Case) -> dict[str, float]:
    """Return how far the loss and the gradient of each leaf are from one device's in float64."""
    with jax.enable_x64(case.precision != "fp32"):
        return _ERRORS[case.join](case)


def errors_of_one_device(case: Case) -> dict[str, float]:
    """Return how far one device's in fp32 are: of each leaf the largest distance of some draws.

    Rounding is a draw: weights that differ in their last bits give another, and one of them may be
    exact by chance.
    """
    model, largest = case.model, dict[str, float]()
    for draw in range(DRAWS):
        made = _one_device(model, np.float32, np.float32, draw)
        exact = _one_device(model, np.float32, np.float64, draw)
        for name, error in distances(made, exact, _zero_leaves(model, exact)).items():
            largest[name] = max(error, largest.get(name, 0.0))
    return largest


def _of_one_program(case: Case) -> dict[str, float]:
    model, plan = case.model, case.plan
    setting = _setting(model, case.policy.master_dtype)
    if not plan.keeps_error_feedback:
        return _distances(case, gradients_of_step(model, *setting, plan, QUICK, _check_order))
    before = _random_errors(error_layouts(trained_part(parameter_layouts(model, plan)), plan))
    made = gradients_and_errors(model, *setting, plan, before, QUICK)
    # What the sum over sites lacks is in the errors: together they are exact.
    whole = jax.tree_util.tree_map_with_path(
        lambda path, leaf, lost, owed: (
            np.asarray(leaf) + _over_sites(path, lost - owed) / float(made.targets)
        ),
        made.gradients,
        made.errors,
        before,
    )
    rounded = jax.tree.map(lambda leaf: np.abs(leaf).max() > 0, made.errors)
    assert jax.tree.all(rounded), "each leaf must lose something to int8"
    return _distances(case, Result(made.loss, jax.tree.map(jnp.asarray, whole)))


def _of_islands(case: Case) -> dict[str, float]:
    assert case.axes is not None, case.missing
    model, (parameters, batch, _) = case.model, _setting(case.model, case.policy.master_dtype)
    inside = {axis: size for axis, size in case.axes.items() if axis not in ("dc", "stage")}
    stages = case.dc * case.axes["stage"]
    plans = site_plans(
        stages, inside, dtypes=case.policy, microbatches=case.microbatches, **case.options
    )
    shape = {"rows": ROWS, "sequence": SEQUENCE, "settings": DESCENT}
    if case.through_sites:
        islands = stage_islands(model, plans, case.event_order, case.axes["stage"], **shape)
        batches = [batch] * stages
    else:
        islands = data_islands(model, plans, chunks=2, held=case.microbatches, **shape)
        batches = shares(batch, case.dc)
    held = [jax.device_get(island.part.held(parameters)) for island in islands]
    for island, own in zip(islands, held, strict=True):
        island.start_from(own)
    metrics = step_all(islands, batches)
    for of_site in metrics:
        np.testing.assert_equal(of_site, metrics[0])
    found: dict[str, float] = {}
    exact = _exact(case)
    for island, before in zip(islands, held, strict=True):
        after = island.whole().parameters
        loss = sum(metrics[0].get(name, 0) for name in ("loss", "mtp_loss", "aux_loss"))
        made = Result(loss, _without_router_biases(_descended(before, after)))
        wanted = Result(exact.loss, _without_router_biases(island.part.held(exact.gradients)))
        for name, error in distances(made, wanted, _zero_leaves(model, wanted)).items():
            found[name] = max(error, found.get(name, 0.0))
    return found


_ERRORS = {"one program": _of_one_program, "islands": _of_islands}


@functools.cache
def _setting(model: ModelConfig, dtype: Any, draw: int = 0) -> tuple[Any, Any, Any]:
    """Parameters of which none is zero, a batch, and a dropout key where the model has dropout.

    Draws differ by the last bits of a float32.
    """
    generator, last_bits = np.random.default_rng(1), np.random.default_rng(draw)
    dtype = np.dtype(dtype)

    def initial(path: Any, shape: Any) -> np.ndarray:
        around = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        values = around + SPREAD[dtype] * generator.standard_normal(shape.shape)
        if draw:
            values *= 1 + 1e-6 * last_bits.uniform(-1, 1, shape.shape)
        return values.astype(dtype)

    parameters = jax.tree_util.tree_map_with_path(initial, parameter_shapes(model))
    batch = make_batch(model, rows=ROWS, sequence=SEQUENCE)
    key = jax.random.fold_in(jax.random.key(SEED), 0)
    return parameters, batch, key if model.dropout else None


@functools.cache
def _one_device(model: ModelConfig, weights: Any, dtype: Any, draw: int = 0) -> Result:
    """Compute in `dtype` with weights drawn in the dtype `weights`."""
    parameters, batch, dropout_key = _setting(model, weights, draw)
    parameters = jax.tree.map(lambda leaf: leaf.astype(dtype), parameters)
    with jax.enable_x64(dtype == np.float64):
        return jax.device_get(_program_of_one_device(model)(parameters, batch, dropout_key))


@functools.cache
def _program_of_one_device(model: ModelConfig) -> Any:
    # Divided at the end, as a step does: the excess of experts' choices has no cotangent.
    def mean(parameters: Any, batch: Any, dropout_key: Any) -> Result:
        split = split_trained(mark_frozen(model, parameters))

        def total(trained: Any) -> Any:
            return loss_sum(unmarked(split.merge(trained)), batch, model, dropout_key=dropout_key)

        (loss, count), gradients = jax.value_and_grad(total, has_aux=True)(split.trained)
        return Result(loss / count, jax.tree.map(lambda leaf: leaf / count, gradients))

    return jax.jit(mean, compiler_options=QUICK)


@functools.cache
def _one_device_in_fp8(model: ModelConfig, policy: Any, microbatches: int) -> Result:
    plan = step_plan_on(make_mesh(devices=jax.devices()[:1]), policy, microbatches)
    setting = _setting(model, policy.master_dtype)
    return jax.device_get(gradients_of_step(model, *setting, plan, QUICK))


def _exact(case: Case) -> Result:
    if case.precision.startswith("fp8"):
        return _one_device_in_fp8(case.model, case.policy, FP8_GROUPS)
    return _one_device(case.model, case.policy.master_dtype, np.float64)


def _distances(case: Case, made: Result) -> dict[str, float]:
    exact = _exact(case)
    return distances(made, exact, _zero_leaves(case.model, exact))


def _zero_leaves(model: ModelConfig, exact: Result) -> tuple[str, ...]:
    """Name the leaves that are zero but for rounding.

    Softmax does not see what is added to all scores of a query alike.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(exact)]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    return tuple(name for name in names if model.qkv_bias and name.endswith("key.bias"))


def _check_order(text: str) -> None:
    unordered = unordered_collectives(text)
    assert not unordered, f"devices may wait for each other for ever: {unordered}"


def _random_errors(places: Any) -> Any:
    """Errors of steps before, of every site."""
    generator = np.random.default_rng(5)
    return jax.tree.map(
        lambda place: generator.standard_normal(place.shape).astype(place.dtype), places
    )


def _over_sites(path: Any, errors: Any) -> Any:
    return np.asarray(errors).sum(axis=1 if path[0].key == "layers" else 0)


def _descended(before: Any, after: Any) -> Any:
    return jax.tree.map(
        lambda old, new: jnp.asarray((np.asarray(old) - np.asarray(new)) / RATE), before, after
    )


def _without_router_biases(tree: Any) -> Any:
    """An update moves them by the sign of the excess alone."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if path[-1].key == "score_bias" else leaf, tree
    )
