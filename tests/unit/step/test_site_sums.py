"""Sites with a mesh each, whose sums are added on the host, train as one program on all of them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import whole_state
from support.small_models import ROWS, make_batch, model_of

from geojax import make_mesh
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.precision import RECIPES, policy
from geojax.step.plan import StepPlan
from geojax.step.program import batch_specs, signals_on_mesh
from geojax.step.state import initial_state, state_layouts
from geojax.step.update import SiteSums, apply_sums, site_sums, sum_over_sites, train_step
from geojax.train.batches import global_batch, sequences_of_process

SITE = {"data": 2, "tensor": 2}
SETTINGS = OptimizerSettings(warmup_steps=1)
SEED = 11
CASES = {
    "unequal": ("gpt3", "fp64", None, (16, 8), {"bucket_bytes": 4096}),
    "overlap": ("llama", "fp64", None, (12, 12), {"zero_stage": 3, "overlap_grad_reduce": True}),
    "fp8": ("llama", "fp64", "delayed", (12, 12), {"zero_stage": 2}),
}


class Trained:
    """The programs of one mesh on a model."""

    def __init__(self, case, devices, **changes):
        family, precision, recipe, _, options = CASES[case]
        self.model = model_of(family)
        own = dataclasses.replace(policy(precision), recipe=RECIPES.get(recipe))
        dc = len(devices) // 4
        options = options | {"share_amax_across_dc": recipe is not None} | changes
        self.plan = StepPlan(make_mesh(devices=devices, dc=dc, **SITE), own, **options)
        self.optimizer = make_optimizer(SETTINGS, 10)
        self.schedule = learning_rate_schedule(SETTINGS, 10)
        self.layouts = state_layouts(self.model, self.optimizer, self.plan)
        self.specs = jax.tree.map(lambda place: place.spec(), self.layouts)
        amax = None if recipe is None else PartitionSpec()
        self.sum_specs = SiteSums(self.specs.parameters, PartitionSpec(), amax, None)

    def mapped(self, function, in_specs, out_specs):
        program = jax.shard_map(
            function, mesh=self.plan.mesh, in_specs=in_specs, out_specs=out_specs
        )
        return jax.jit(program)

    def start(self):
        return initial_state(self.model, self.optimizer, self.layouts, self.plan, 3)

    def on_mesh(self, batch):
        rows = len(batch["row"])
        return global_batch(self.plan, rows, sequences_of_process(self.plan, rows), batch)

    def signals(self):
        return np.ones(signals_on_mesh(self.plan).shape, np.float32)

    def step(self, batch):
        """State and metrics after one step, in one program."""
        step = functools.partial(
            train_step,
            layouts=self.layouts,
            model=self.model,
            plan=self.plan,
            optimizer=self.optimizer,
            schedule=self.schedule,
        )
        specs = (self.specs, batch_specs(batch, self.plan), self.plan.signal_spec, PartitionSpec())
        program = self.mapped(step, specs, (self.specs, PartitionSpec()))
        state, metrics = program(self.start(), self.on_mesh(batch), self.signals(), np.uint32(SEED))
        return whole_state.on_host(state, self.layouts), metrics

    def sums(self, batch):
        """The sums of this mesh, on the host."""

        def of_site(state, rows, signals):
            key = jax.random.fold_in(jax.random.key(SEED), state.step)
            sums = site_sums(
                state,
                rows,
                signals,
                layouts=self.layouts.parameters,
                model=self.model,
                plan=self.plan,
                dropout_key=key if self.model.dropout else None,
            )
            return sum_over_sites(sums, self.plan)

        specs = (self.specs, batch_specs(batch, self.plan), self.plan.signal_spec)
        program = self.mapped(of_site, specs, self.sum_specs)
        return jax.device_get(program(self.start(), self.on_mesh(batch), self.signals()))

    def apply(self, sums):
        """State and metrics after the update that `sums` make."""
        apply = functools.partial(
            apply_sums,
            layouts=self.layouts,
            plan=self.plan,
            optimizer=self.optimizer,
            schedule=self.schedule,
        )
        specs = (self.specs, self.sum_specs)
        program = self.mapped(apply, specs, (self.specs, PartitionSpec()))
        state, metrics = program(self.start(), sums)
        return whole_state.on_host(state, self.layouts), metrics


def added(sums):
    """The sums of all sites, as a transport would make them."""
    total = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *sums)
    amax = None if sums[0].amax is None else np.max([each.amax for each in sums], axis=0)
    return total._replace(amax=amax)


@pytest.mark.parametrize("case", CASES)
def test_sums_of_two_sites_added_on_the_host_make_the_step_of_one_program(case):
    with jax.enable_x64(True):
        batch = make_batch(model_of(CASES[case][0]))
        shares = np.split(np.arange(ROWS), [CASES[case][3][0]])
        sites = [
            Trained(case, jax.devices()[first : first + 4], share_amax_across_dc=False)
            for first in (0, 4)
        ]
        total = added(
            [
                site.sums({name: leaf[share] for name, leaf in batch.items()})
                for site, share in zip(sites, shares, strict=True)
            ]
        )
        expected, expected_metrics = Trained(case, jax.devices()[:8]).step(batch)
        first, second = (site.apply(total)[0] for site in sites)
        jax.tree.map(np.testing.assert_array_equal, first, second)
        metrics = sites[0].apply(total)[1]
        assert metrics["stop"] == 8
        compare = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13)
        jax.tree.map(compare, first, expected)
        jax.tree.map(compare, dict(metrics), dict(expected_metrics))
