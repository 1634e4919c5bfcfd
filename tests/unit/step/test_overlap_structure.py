"""With overlap, what a turn of the backward sends and what it computes do not wait for each other.

Read from the jaxpr, where an equation waits for another when there is a path of values from one to
the other.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from support.drawn_layouts import SEQUENCE, Draw
from support.plans import step_plan_on

from geojax import make_mesh
from geojax.collectives import INT8
from geojax.precision import policy
from geojax.step.error_feedback import error_layouts
from geojax.step.gradients import step_gradients
from geojax.step.program import batch_shape, batch_specs
from geojax.step.state import parameter_layouts

LAYERS = 4
PRODUCTS, SCATTERS = {"dot_general"}, {"reduce_scatter"}
GATHERS = {"all_gather over dc", "all_gather_invariant over dc"}
SUMS = {"psum over dc", "psum_invariant over dc", "ppermute over dc"}
"""The last is that of two sites in a wire format."""


def traced(**options):
    """The jaxpr of the gradients of a step on two sites."""
    model = Draw("llama", "dense", 2, 0.0, (), 1, ()).model()
    model = model.model_copy(update={"num_hidden_layers": LAYERS})
    plan = step_plan_on(make_mesh(dc=2, data=4), policy("fp32"), **options)
    layouts = parameter_layouts(model, plan)
    specs = jax.tree.map(lambda place: place.spec(), layouts)
    batch = batch_shape(16, SEQUENCE)
    gradients = functools.partial(
        step_gradients, layouts=layouts, model=model, plan=plan, dropout_key=None
    )
    of_errors = error_layouts(layouts, plan)
    program = jax.shard_map(
        lambda shards, batch, errors: gradients(shards, batch, error_feedback=errors).gradients,
        mesh=plan.mesh,
        in_specs=(
            specs,
            batch_specs(batch, plan),
            jax.tree.map(lambda place: place.spec(), of_errors),
        ),
        out_specs=specs,
    )
    shards, errors = jax.tree.map(
        lambda place: jax.ShapeDtypeStruct(place.padded_shape, jnp.float32), (layouts, of_errors)
    )
    return jax.make_jaxpr(program)(shards, batch, errors).jaxpr


def inner(equation):
    """The jaxprs that an equation holds."""
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def names(equation):
    """The primitives of an equation and of all that it holds, and which of them cross sites."""
    axes = equation.params.get("axes") or equation.params.get("axis_name") or ()
    yield equation.primitive.name + (" over dc" if "dc" in axes else "")
    for jaxpr in inner(equation):
        for held in jaxpr.eqns:
            yield from names(held)


def loops(jaxpr):
    """All scans in a jaxpr: (its body, the depth of loops around it)."""
    for equation in jaxpr.eqns:
        depth = int(equation.primitive.name == "scan")
        for body in inner(equation):
            if depth:
                yield body, 0
            yield from ((found, around + depth) for found, around in loops(body))


def ancestors(jaxpr):
    """For each equation the numbers of those that it waits for."""
    made_by, waits = {}, []
    for number, equation in enumerate(jaxpr.eqns):
        sources = [made_by[v] for v in equation.invars if not hasattr(v, "val") and v in made_by]
        waits.append(set(sources).union(*(waits[source] for source in sources)))
        made_by.update(dict.fromkeys(equation.outvars, number))
    return waits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero_stage": 0},
        {"microbatches": 2},
        {"zero_stage": 2, "microbatches": 2, "remat": "selective"},
        {"zero_stage": 3, "remat": "full"},
        {"wire_format": INT8},
    ],
)
def test_messages_and_products_of_a_turn_do_not_wait_for_each_other(options):
    found = [
        (body, around)
        for body, around in loops(traced(overlap_grad_reduce=True, **options))
        if any(SUMS & set(names(equation)) for equation in body.eqns)
    ]
    assert len(found) == 1, "one loop, over layers, sends something over the link"
    ((body, around),) = found
    assert around == 0, "and it is in no other loop"
    kinds = [set(names(equation)) for equation in body.eqns]
    waits = ancestors(body)
    numbers = range(len(kinds))
    products = {number for number in numbers if PRODUCTS & kinds[number]}
    sums = {number for number in numbers if SUMS & kinds[number]}
    scatters = {number for number in numbers if SCATTERS & kinds[number]} - sums
    assert products
    assert sums
    assert scatters or options.get("zero_stage") == 0
    for number in sums | scatters:
        assert number not in products
        assert not waits[number] & products, "a message waits for the layer"
    for number in products:
        assert not waits[number] & (sums | scatters), "the layer waits for a message"
    for number in sums:
        assert not waits[number], "what crosses is ready when a turn begins"
    waiting = [kinds[number] for number in numbers if waits[number] & sums]
    assert all(held <= {"after"} for held in waiting), "and is put away for the next one"


@pytest.mark.parametrize("options", [{}, {"zero_stage": 3, "shard_across_sites": True}])
def test_without_overlap_nothing_crosses_sites_in_a_loop(options):
    crossing = SUMS | GATHERS | {f"{name} over dc" for name in SCATTERS}
    jaxpr = traced(microbatches=2, **options)
    held = [set(names(equation)) for body, _ in loops(jaxpr) for equation in body.eqns]
    assert held
    assert not [found & crossing for found in held if found & crossing]
    assert [found for found in map(set, map(names, jaxpr.eqns)) if found & crossing]
