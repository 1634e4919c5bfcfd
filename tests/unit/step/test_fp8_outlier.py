"""One rank of one site holds an outlier: whose scales change, and whose do not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from support.plans import step_plan_on

from geojax import make_mesh
from geojax.precision import AMAX, RECIPES, Axes, policy
from geojax.step.amax_history import max_in_site, max_over_sites, next_history, prev_amax
from geojax.step.plan import BATCH_AXES

TOKENS, INPUTS, OUTPUTS, OUTLIER = 16, 64, 32, 1e6
AXES = {"dc": 2, "data": 2, "tensor": 2}
GROUPS = PartitionSpec(BATCH_AXES)
"""Ranks of `tensor` multiply the same tokens, each with half of the inputs."""
ITS_GROUP, ITS_SITE = 2, 1


@functools.cache
def plan_of(recipe):
    own = RECIPES[recipe]
    own = dataclasses.replace(own, history=4) if own.history else own
    return step_plan_on(make_mesh(**AXES), dataclasses.replace(policy("fp32"), recipe=own))


@functools.cache
def program(recipe):
    """(history, x, w, dy) to y, dx, each group's dw, and the next history: all of one layer."""
    plan = plan_of(recipe)

    def step(history, x, w, dy):
        known = prev_amax(history, plan)
        w = jax.lax.pcast(w, BATCH_AXES, to="varying")

        def product(x, w, known):
            amax = None if known is None else known[AMAX][0]
            axes = Axes(x=("tensor",), w=("tensor",))
            return jax.lax.psum(plan.matmul.multiply(x, w, amax, axes), "tensor")

        y, backward = jax.vjp(product, x, w, known)
        dx, dw, seen = backward(dy)
        amax = max_over_sites(max_in_site(seen, plan), plan)
        return y, dx, dw[None], next_history(history, amax)

    x = PartitionSpec(BATCH_AXES, "tensor")
    history = PartitionSpec(None, "dc")
    return jax.jit(
        jax.shard_map(
            step,
            mesh=plan.mesh,
            in_specs=(history, x, PartitionSpec("tensor"), GROUPS),
            out_specs=(GROUPS, x, PartitionSpec(BATCH_AXES, "tensor"), history),
            check_vma=True,
        )
    )


def operands():
    """x, the same with an outlier among the inputs of the first `tensor` rank of a group, w, dy."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = np.array(jax.random.normal(keys[0], (4 * TOKENS, INPUTS)))
    hit = x.copy()
    hit[ITS_GROUP * TOKENS + 5, 3] = OUTLIER
    w = jax.random.normal(keys[1], (INPUTS, OUTPUTS))
    return x, hit, w, jax.random.normal(keys[2], (4 * TOKENS, OUTPUTS))


def by_group(rows):
    return np.asarray(rows).reshape(4, TOKENS, -1)


def errors(y, x, w):
    """Of each group, but for the token with the outlier: relative, root mean square."""
    exact, made = (np.delete(by_group(rows), 5, axis=1) for rows in (x @ w, y))
    return np.sqrt(np.square(made - exact).mean((1, 2)) / np.square(exact).mean((1, 2)))


def test_current_scaling_follows_it_at_once_where_the_product_is_shared_and_nowhere_else():
    x, hit, w, dy = operands()
    before, after = (program("current")(None, each, w, dy) for each in (x, hit))
    others = [group for group in range(4) if group != ITS_GROUP]
    np.testing.assert_array_equal(by_group(before[0])[others], by_group(after[0])[others])
    np.testing.assert_array_equal(np.asarray(before[2])[others], np.asarray(after[2])[others])
    np.testing.assert_array_equal(before[1], after[1])  # which reads dy and w
    # Both ranks of its group have the scale of the whole operand: what one device would have.
    own = slice(ITS_GROUP * TOKENS, (ITS_GROUP + 1) * TOKENS)
    alone = plan_of("current").matmul.multiply(hit[own], w)
    np.testing.assert_allclose(by_group(after[0])[ITS_GROUP], alone, rtol=1e-5, atol=1e-2)
    assert errors(before[0], x, w).max() < 0.05
    assert errors(after[0], hit, w)[ITS_GROUP] > 0.5


def test_delayed_scaling_clips_it_and_its_site_alone_remembers_it():
    x, hit, w, dy = operands()
    run = program("delayed")
    typical = jnp.stack([jnp.abs(each).max() for each in (x, w, dy)])
    history = {AMAX: jnp.zeros((1, 2, 3, 4)).at[..., 0].set(typical)}
    before, after = (run(history, each, w, dy) for each in (x, hit))
    others = [group for group in range(4) if group != ITS_GROUP]
    np.testing.assert_array_equal(by_group(before[0])[others], by_group(after[0])[others])
    np.testing.assert_array_equal(np.asarray(before[2])[others], np.asarray(after[2])[others])
    # (Clipped to the largest that was expected, it disturbs nobody else in its group either.)
    assert errors(after[0], hit, w).max() < 0.05
    seen = np.asarray(after[3][AMAX])[0, :, 0, 0]
    assert seen[ITS_SITE] == OUTLIER
    assert seen[1 - ITS_SITE] == np.abs(x[: 2 * TOKENS]).max()
    then = errors(run(after[3], x, w, dy)[0], x, w)
    its_site = [2 * ITS_SITE, 2 * ITS_SITE + 1]
    assert then[its_site].min() > 0.5
    assert np.delete(then, its_site).max() < 0.05
