"""Every optimizer on every layout equals optax's on one device, to 1e-10 after ten steps.

Gradients are given, sharded as a step's are: what makes them has tests of its own. One of eleven is
not finite, and that step leaves parameters and state as they are.
"""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import whole_state
from support.drawn_layouts import Draw
from support.optax_chains import average_of_optax, chain_of_optax
from support.plans import step_plan_on
from support.small_models import drawn_parameters
from support.step_traffic import sends_as_counted, traced_step

from geojax import make_mesh
from geojax.hlo import collective_traffic
from geojax.models import parameter_kinds
from geojax.named_arrays import leaves_by_name
from geojax.optim import (
    OPTIMIZERS,
    OptimizerSettings,
    apply_updates,
    global_norm,
    make_optimizer,
    optimizer_layouts,
)
from geojax.optim.averages import evaluated_weights
from geojax.optim.optimizer import ParameterGroup
from geojax.pipeline import Placement
from geojax.planner.traffic.optimizer import optimizer_collectives
from geojax.precision import policy
from geojax.sharding import leaf_layouts
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import parameter_layouts

STEPS, BAD_STEP = 11, 4
MODEL = Draw("llama", "dropless", 2, 0.0, (), 1, ()).model()
MODEL = MODEL.model_copy(update={"num_hidden_layers": 3, "tie_word_embeddings": False})
LEAVES = (
    "embedding.tokens.embedding",
    "layers.attention_norm.scale",
    "layers.attention.query.kernel",
    "layers.attention.output.kernel",
    "layers.experts.gate.kernel",
    "layers.experts.up.kernel",
    "layers.experts.down.kernel",
    "head.kernel",
)
"""Parameters of the model that are trained: of each kind and shape one, which compile in half the
time of all."""
LAYOUTS = {
    "zero 0": ({"dc": 2, "data": 2}, {"zero_stage": 0}),
    # No dim divides over 7 ranks: everything is padded.
    "zero 1": ({"data": 7}, {}),
    "tensor": ({"dc": 2, "data": 2, "tensor": 2}, {}),
    "expert": ({"data": 3, "expert": 2}, {}),
    "pipeline": (
        {"stage": 2, "data": 2, "tensor": 2},
        {"staged_layers": StagedLayers(Placement.linear(2), (2, 1))},
    ),
}


CHANGES = {
    "lion": {"ema_decay": 0.9},
    "schedule_free_adamw": {"schedule": "constant"},
}
SETTINGS = {
    name: OptimizerSettings(
        name=name, warmup_steps=3, peak_learning_rate=1e-2, **CHANGES.get(name, {})
    )
    for name in OPTIMIZERS
}


def of_leaves(tree):
    """The part of a tree like the model's parameters that is trained."""
    kept = {}
    for name in LEAVES:
        *above, last = name.split(".")
        source, target = tree, kept
        for part in above:
            source, target = source[part], target.setdefault(part, {})
        target[last] = source[last]
    return kept


def gradient_at(step, bases):
    """A gradient that turns from step to step, or is not finite."""
    first, second = bases
    bad = jnp.where(step == BAD_STEP, jnp.nan, 1.0)
    return jax.tree.map(lambda a, b: bad * (a * jnp.cos(step) + b * jnp.sin(step)), first, second)


@functools.cache
def start():
    parameters = of_leaves(drawn_parameters(MODEL, jnp.float64))
    generator = np.random.default_rng(0)
    bases = [jax.tree.map(lambda x: generator.normal(size=x.shape), parameters) for _ in range(2)]
    return parameters, tuple(bases)


@functools.cache
def parameters_of_optax():
    """The parameters and their average after all finite steps, on one device, by optimizer."""
    good = np.delete(np.arange(STEPS), BAD_STEP)

    def train(name, parameters, bases):
        settings = SETTINGS[name]
        optimizer = chain_of_optax(settings, STEPS, parameter_kinds(MODEL))

        def one(carry, step):
            parameters, state, average = carry
            updates, state = optimizer.update(gradient_at(step, bases), state, parameters)
            parameters = optax.apply_updates(parameters, updates)
            average = average_of_optax(settings, parameters, state, average)
            return (parameters, state, average), None

        first = parameters, optimizer.init(parameters), parameters
        parameters, _, average = jax.lax.scan(one, first, good)[0]
        return parameters, average

    def train_all(parameters, bases):
        return {name: train(name, parameters, bases) for name in OPTIMIZERS}

    return jax.jit(train_all)(*start())


def step_on(layouts, optimizer):
    def step(carry, gradient):
        parameters, state = carry
        norm = global_norm(gradient, layouts)
        finite = jnp.isfinite(norm)
        updates, state = optimizer.update(
            gradient, state, parameters, norm=norm, finite=finite, layouts=layouts
        )
        return apply_updates(parameters, updates, finite), state

    return step


@functools.cache
def program_on(name):
    """Ten steps of all optimizers in one program, lowered; and the bases and states it takes."""
    axes, options = LAYOUTS[name]
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    plan = step_plan_on(mesh, policy("fp64"), **options)
    layouts = of_leaves(parameter_layouts(MODEL, plan))
    optimizers = {
        each: make_optimizer(SETTINGS[each], STEPS, parameter_kinds(MODEL)) for each in OPTIMIZERS
    }

    def train(parameters, bases, states):
        made = {}
        for each, optimizer in optimizers.items():
            step = step_on(layouts, optimizer)

            def one(carry, number, step=step):
                return step(carry, gradient_at(number, bases)), None

            made[each], _ = jax.lax.scan(one, (parameters, states[each]), jnp.arange(STEPS))
        return made

    parameters, bases = start()
    pad = jax.jit(
        lambda tree: jax.tree.map(lambda leaf, place: place.pad(leaf), tree, layouts),
        out_shardings=leaf_layouts.shardings(layouts, mesh),
    )
    of_states = {each: optimizer_layouts(made, layouts) for each, made in optimizers.items()}
    padded = pad(parameters)
    states = jax.jit(
        lambda tree: {each: made.init(tree) for each, made in optimizers.items()},
        out_shardings=leaf_layouts.shardings(of_states, mesh),
    )(padded)
    specs, state_specs = (
        jax.tree.map(lambda place: place.spec(), tree) for tree in (layouts, of_states)
    )
    program = jax.shard_map(
        train,
        mesh=mesh,
        in_specs=(specs, (specs, specs), state_specs),
        out_specs={each: (specs, state_specs[each]) for each in OPTIMIZERS},
        check_vma=True,
    )
    arguments = padded, tuple(map(pad, bases)), states
    return jax.jit(program).lower(*arguments), arguments, layouts, plan


@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_steps_equal_those_of_optax_on_one_device(name):
    with jax.enable_x64():
        program, arguments, layouts, plan = program_on(name)
        made = program.compile()(*arguments)
        for each, wanted in parameters_of_optax().items():
            parameters, state = made[each]
            actual = parameters, evaluated_weights(parameters, state)
            whole = leaves_by_name([whole_state.trim(tree, layouts, plan.mesh) for tree in actual])
            for leaf, expected in leaves_by_name(list(wanted)).items():
                expected = np.asarray(expected)
                error = np.abs(np.asarray(whole[leaf]) - expected).max() / np.abs(expected).max()
                assert error <= 1e-10, f"{each}, {leaf}: {error:.2e} of the largest"


@pytest.mark.parametrize("name", LAYOUTS)
def test_matrices_are_exchanged_in_the_site_byte_for_byte_as_predicted(name):
    with jax.enable_x64():
        program, _, layouts, plan = program_on(name)
    sent = {
        axes: kinds["all-to-all"].bytes_sent / STEPS
        for axes, kinds in collective_traffic(program, plan.mesh).sums().items()
        if "all-to-all" in kinds
    }
    assert not any("dc" in axes for axes in sent)
    predicted = collections.Counter()
    for each in optimizer_collectives(MODEL, SETTINGS["muon"], layouts, plan):
        predicted[each.axes] += each.bytes
    assert sent == +predicted
    assert bool(sent) == (name != "zero 0")


def test_their_statistics_send_nothing_over_dc():
    axes, options = LAYOUTS["tensor"]
    plan = step_plan_on(make_mesh(**axes), policy("fp32"), **options)
    group = ParameterGroup(pattern=r"attention\.", optimizer="muon")
    settings = SETTINGS["adafactor"].model_copy(update={"groups": (group,)})
    counted = sends_as_counted(MODEL, plan, 8, 16, settings).by_axes
    plain = traced_step(MODEL, plan, 8, 16)[1].by_axes
    more = collections.Counter(
        {axes: count - plain.get(axes, 0) for axes, count in counted.items()}
    )
    predicted = collections.Counter()
    for each in optimizer_collectives(MODEL, settings, parameter_layouts(MODEL, plan), plan):
        predicted[each.axes] += each.bytes
    assert +more == +predicted
    assert set(+more) == {("data",), ("tensor",), ("data", "tensor")}


@pytest.mark.parametrize("name", ["tensor", "expert"])
def test_zero_1_2_and_3_keep_the_state_alike(name):
    axes, _ = LAYOUTS[name]
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    one, two, three = (
        parameter_layouts(MODEL, step_plan_on(mesh, policy("fp64"), zero_stage=stage))
        for stage in (1, 2, 3)
    )
    assert one == two == three
