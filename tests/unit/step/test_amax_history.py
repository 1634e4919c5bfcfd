"""Delayed scaling: one history on every layout, which nothing sums and no link carries."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from support import whole_state
from support.plans import step_plan_on
from support.small_models import SEQUENCE, make_batch

from geojax import make_mesh
from geojax.checkpoint import Checkpointer
from geojax.hlo import collective_traffic
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import RECIPES, policy
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.program import batch_shape, lower_step
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import (
    initial_state,
    state_layouts,
    with_own_sites,
    with_saved_sites,
)

ROWS, STEPS, HISTORY = 8, 3, 4
OUTLIER_ROW = 5
DELAYED = dataclasses.replace(RECIPES["delayed"], history=HISTORY)


def model_of(mixture):
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    return ModelConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=20,
        vocab_size=61,
        max_position_embeddings=64,
        norm="rmsnorm",
        hidden_act="silu",
        **(experts if mixture else {}),
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """A few steps of a small model on a layout."""

    axes: tuple[tuple[str, int], ...]
    microbatches: int = 1
    mixture: bool = False
    recipe: bool = True
    pipeline: bool = False
    options: tuple[tuple[str, object], ...] = ()

    @functools.cached_property
    def plan(self):
        axes = dict(self.axes)
        mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
        options = dict(self.options)
        if self.pipeline:
            placement = Placement.linear(2)
            table = tick_table("branch_free", placement, self.microbatches, [1])
            options |= {
                "dc_role": "stage",
                "staged_layers": StagedLayers(placement, (1, 1)),
                "tick_program": TickProgram.of(table, branch_free=True),
            }
        own = dataclasses.replace(policy("fp64"), recipe=DELAYED if self.recipe else None)
        return step_plan_on(mesh, own, self.microbatches, **options)

    @functools.cached_property
    def built(self):
        settings = OptimizerSettings(peak_learning_rate=1e-2, warmup_steps=1)
        optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
        model = model_of(self.mixture)
        layouts = state_layouts(model, optimizer, self.plan)
        batch = batch_shape(ROWS, SEQUENCE)
        lowered = lower_step(layouts, model, self.plan, optimizer, schedule, batch)
        program = lowered.compile()
        return program, layouts, initial_state(model, optimizer, layouts, self.plan, 3)

    def batch(self, step):
        """The losses of one row weigh much: what its rank sees going backwards is an outlier."""
        made = make_batch(model_of(self.mixture), seed=step, rows=ROWS)
        made["loss_mask"][OUTLIER_ROW] *= 100.0
        return global_batch(self.plan, ROWS, sequences_of_process(self.plan, ROWS), made)

    def step(self, state, number):
        signals = global_signals(self.plan, {"stop": False, "save": False})
        return self.built[0](state, self.batch(number), signals, np.uint32(0))

    @functools.cached_property
    def trained(self):
        """The losses of all steps, and the state after them as a checkpoint has it."""
        _, layouts, state = self.built
        losses = []
        for number in range(STEPS):
            state, metrics = self.step(state, number)
            losses.append(float(metrics["loss"]))
        return losses, whole_state.trim(state, layouts, self.plan.mesh)


@functools.cache
def alone(mixture):
    """One device; what it sees does not depend on the number of microbatches."""
    with jax.enable_x64(True):
        return Run((("data", 1),), 2, mixture).trained


LAYOUTS = {
    "zero 2": Run((("data", 2),), 2, options=(("zero_stage", 2), ("overlap_grad_reduce", True))),
    "zero 3": Run((("data", 2), ("context", 2)), options=(("zero_stage", 3),)),
    "pipeline": Run((("dc", 2), ("data", 2), ("tensor", 2)), 4, pipeline=True),
    "experts": Run((("expert", 2), ("tensor", 2)), mixture=True),
    "sites share scales": Run(
        (("dc", 2), ("data", 2)), 2, options=(("share_amax_across_dc", True),)
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_history_of_one_device(name):
    run = LAYOUTS[name]
    expected_losses, expected = alone(run.mixture)
    with jax.enable_x64(True):
        losses, state = run.trained
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-8)
        histories = jax.tree.leaves_with_path(state.amax_history)
        assert len(histories) == 7, "linear layers, and no router"
        for (path, own), wanted in zip(
            histories, jax.tree.leaves(expected.amax_history), strict=True
        ):
            assert own.shape == (2, 1, 3, HISTORY)
            seen = np.asarray(wanted)[..., :STEPS]
            assert (seen > 0).all()
            assert not np.asarray(wanted)[..., STEPS:].any(), "one roll a step"
            np.testing.assert_allclose(own, wanted, rtol=1e-6, err_msg=str(path))


SITES = Run((("dc", 2), ("data", 2)), 2)


def test_sites_keep_histories_of_their_own_and_no_magnitude_crosses_between_them():
    with jax.enable_x64(True):
        run = SITES
        traffic = collective_traffic(run.built[0], run.plan.mesh)
        without = collective_traffic(Run(SITES.axes, 2, recipe=False).built[0], run.plan.mesh)
        assert traffic.bytes_over("dc") == without.bytes_over("dc")
        added = len(traffic.collectives) - len(without.collectives)
        assert added == 1, "one message a step, for all layers and microbatches"
        _, state = run.trained
        for leaf in jax.tree.leaves(state.amax_history):
            of_gradients = np.asarray(leaf)[:, :, 2, :STEPS]  # [layers, sites, steps]
            assert (of_gradients[:, 1] > 10 * of_gradients[:, 0]).all(), "the row is at one site"


def test_sites_that_share_scales_send_each_other_one_small_message_a_step():
    with jax.enable_x64(True):
        run = LAYOUTS["sites share scales"]
        assert (run.axes, run.microbatches) == (SITES.axes, SITES.microbatches)
        shared, apart = (
            [
                (each.kind, each.payload_bytes, each.executions, each.in_loop)
                for each in collective_traffic(own.built[0], own.plan.mesh).over("dc")
            ]
            for own in (run, SITES)
        )
        for message in apart:
            shared.remove(message)
        linear_layers, layers, operands = 7, 2, 3
        assert shared == [("all-reduce", 4 * linear_layers * layers * operands, 1, False)]


def restored(tmp_path, whole, run):
    """The state of `run` after a checkpoint of the state `whole` of both sites was restored."""
    _, layouts, _ = run.built
    saved_layouts, mesh = SITES.built[1], SITES.plan.mesh
    with Checkpointer(tmp_path, mesh, sites=("east", "west")) as checkpointer:
        checkpointer.save(1, whole_state.pad(whole, saved_layouts, mesh), saved_layouts, {})
    with Checkpointer(tmp_path, run.plan.mesh) as checkpointer:
        saved, _ = checkpointer.restore(layouts, adapt=with_saved_sites)
    return with_own_sites(saved, layouts, run.plan)


def test_histories_are_in_the_checkpoint_and_come_back_to_any_number_of_sites(tmp_path):
    with jax.enable_x64(True):
        _, whole = SITES.trained
        same = restored(tmp_path / "same", whole, SITES)
        again = whole_state.trim(same, SITES.built[1], SITES.plan.mesh)
        jax.tree.map(np.testing.assert_array_equal, again, whole)
        one = Run((("data", 2), ("tensor", 2)), 2)
        merged = restored(tmp_path / "one", whole, one)
        histories = (jax.tree.leaves(each.amax_history) for each in (merged, whole))
        for own, wanted in zip(*histories, strict=True):
            np.testing.assert_array_equal(own, np.asarray(wanted).max(axis=1, keepdims=True))
        one.step(merged, STEPS)
