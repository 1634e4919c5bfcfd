"""Error feedback in training: no gradient is lost on any layout, skipped, or in a checkpoint."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import whole_state
from support.plans import step_plan_on
from support.small_models import ROWS, SEQUENCE, make_batch, model_of

from geojax import make_mesh
from geojax.checkpoint import Checkpointer
from geojax.collectives import wire_format
from geojax.optim import (
    OptimizerSettings,
    learning_rate_schedule,
    make_optimizer,
)
from geojax.precision import LossScale, LossScaleSettings, policy
from geojax.sharding import leaf_layouts
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import (
    initial_state,
    state_layouts,
    with_own_sites,
    with_saved_sites,
)


def mesh_of(axes):
    return make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)


def over_sites(errors):
    """The sum of whole errors over the sites."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.asarray(leaf).sum(axis=1 if path[0].key == "layers" else 0), errors
    )


def random_errors(layouts, mesh, size=1.0):
    generator = np.random.default_rng(5)

    def draw(place):
        return place.pad(jnp.asarray(size * generator.standard_normal(place.shape), place.dtype))

    return jax.device_put(jax.tree.map(draw, layouts), leaf_layouts.shardings(layouts, mesh))


@dataclasses.dataclass(frozen=True)
class Run:
    """A few steps of a small model."""

    wire: str
    precision: str = "fp32"
    wreck: int | None = None
    axes: tuple[tuple[str, int], ...] = (("dc", 2), ("data", 2))

    @functools.cached_property
    def plan(self):
        return step_plan_on(
            mesh_of(dict(self.axes)),
            policy(self.precision),
            bucket_bytes=2**14,
            wire_format=wire_format(self.wire),
            loss_scale=LossScaleSettings(initial=2.0**10),
        )

    @functools.cached_property
    def optimizer(self):
        return make_optimizer(OptimizerSettings(peak_learning_rate=1e-2, warmup_steps=5), 40)

    @functools.cached_property
    def layouts(self):
        return state_layouts(model_of("llama"), self.optimizer, self.plan)

    def start(self):
        """The state of fp32 numbers, with what else this run has."""
        zeros = jax.tree.map(
            lambda place: np.zeros(place.padded_shape, place.dtype), self.layouts.error_feedback
        )
        scale = LossScale.start(self.plan.loss_scale) if self.precision == "fp16" else None
        state = dataclasses.replace(plain_start(), error_feedback=zeros, loss_scale=scale)
        return jax.device_put(state, leaf_layouts.shardings(self.layouts, self.plan.mesh))

    @functools.cached_property
    def program(self):
        schedule = learning_rate_schedule(OptimizerSettings(), 40)
        shapes = batch_shape(ROWS, SEQUENCE)
        lowered = lower_step(
            self.layouts, model_of("llama"), self.plan, self.optimizer, schedule, shapes
        )
        return lowered.compile()

    def steps(self, state, first, last):
        """The state after each step, on the host, and the losses."""
        states, losses = [], []
        signals = global_signals(self.plan, {"stop": False, "save": False})
        for step in range(first, last):
            batch = make_batch(model_of("llama"), seed=step)
            if step == self.wreck:
                batch["loss_mask"][5, 7] = 1e7  # leaves the range of float16 on one rank
            rows = global_batch(self.plan, ROWS, sequences_of_process(self.plan, ROWS), batch)
            state, metrics = self.program(state, rows, signals, np.uint32(0))
            states.append(jax.device_get(state))
            losses.append(float(metrics["loss"]))
        return state, states, losses

    def saved_and_restored(self, folder, state, *, into=None):
        """`state` of this run as the run `into` finds it in a checkpoint."""
        into = into or self
        sites = ("east", "west", "north")[: self.plan.mesh.shape["dc"]]
        with Checkpointer(folder, self.plan.mesh, sites=sites) as checkpointer:
            checkpointer.save(1, state, self.layouts, {})
        with Checkpointer(folder, into.plan.mesh) as checkpointer:
            saved, _ = checkpointer.restore(into.layouts, adapt=with_saved_sites)
        own = with_own_sites(saved, into.layouts, into.plan)
        assert jax.tree.map(jnp.shape, own) == jax.tree.map(
            lambda leaf_layout: leaf_layout.padded_shape, into.layouts
        )
        whole = whole_state.trim(state, self.layouts, self.plan.mesh)
        return whole, whole_state.trim(own, into.layouts, into.plan.mesh), own


@functools.cache
def plain_start():
    """Made once: it takes longer to compile than a step."""
    run = Run("none")
    made = initial_state(model_of("llama"), run.optimizer, run.layouts, run.plan, 3)
    return jax.device_get(made)


@functools.cache
def thirty_steps(wire):
    run = Run(wire)
    state, _, losses = run.steps(run.start(), 0, 30)
    return state, losses


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_training_in_a_wire_format_is_near_training_in_fp32(wire):
    _, exact = thirty_steps("none")
    state, losses = thirty_steps(wire)
    assert losses != exact
    np.testing.assert_allclose(losses, exact, rtol=0.01)
    assert losses[-1] < losses[0] - 0.05, "the model should have learned something"
    for leaf in jax.tree.leaves((state.parameters, state.optimizer)):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in copies.values():
            assert others, "each site has a copy"
            for other in others:
                np.testing.assert_array_equal(other, first, "sites have drifted apart")


def test_a_skipped_step_leaves_the_errors_and_a_resumed_run_has_them(tmp_path):
    run = Run("int8", "fp16", wreck=2)
    _, states, _ = run.steps(run.start(), 0, 6)
    counts = [int(state.skipped) for state in states]
    assert counts == [0, 0, 1, 1, 1, 1]
    errors = [state.error_feedback for state in states]
    jax.tree.map(np.testing.assert_array_equal, errors[2], errors[1])
    for leaf in jax.tree.leaves(errors[3:]):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0
    state, _, _ = run.steps(run.start(), 0, 4)
    *_, state = run.saved_and_restored(tmp_path, state)
    _, again, _ = run.steps(state, 4, 6)
    jax.tree.map(np.testing.assert_array_equal, again[-1], states[-1])


def test_a_checkpoint_restores_the_errors_onto_other_sites_and_wire_formats(tmp_path):
    two = Run("int8")
    errors = random_errors(two.layouts.error_feedback, two.plan.mesh)
    state = dataclasses.replace(two.start(), error_feedback=errors)

    whole, other, _ = two.saved_and_restored(
        tmp_path / "layout", state, into=Run("int8", axes=(("dc", 2), ("tensor", 2)))
    )
    jax.tree.map(np.testing.assert_array_equal, other.error_feedback, whole.error_feedback)

    three = Run("int8", axes=(("dc", 3), ("data", 2)))
    whole, other, padded = two.saved_and_restored(tmp_path / "three", state, into=three)
    sums = over_sites(whole.error_feedback), over_sites(other.error_feedback)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *sums)

    plain = Run("none")
    _, other, padded = two.saved_and_restored(tmp_path / "plain", state, into=plain)
    assert other.error_feedback is None
    _, other, _ = plain.saved_and_restored(tmp_path / "again", padded, into=two)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(other.error_feedback))
    jax.tree.map(np.testing.assert_array_equal, other.parameters, whole.parameters)
