"""Sites in role data: equal to one device in float64, and to each other to the bit."""

import jax
import numpy as np
import pytest
from support.islands import OneProgram, data_islands, step_all
from support.small_models import ROWS, make_batch, model_of

from geojax import make_mesh
from geojax.models import ModelConfig
from geojax.precision import policy
from geojax.step.plan import StepPlan

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CASES = {
    # Dropout, a tied table and learned positions; accumulation; a chunk of one and one of two.
    "gpt3": (2, {"data": 2, "tensor": 2}, {"chunks": 2, "held": 2, "microbatches": 3}),
    "moe": (2, {"data": 2, "expert": 2}, {"chunks": 3, "held": 1, "zero_stage": 2}),
    "llama": (3, {"data": 2}, {"chunks": 3, "held": 2, "microbatches": 2, "zero_stage": 2}),
}


def model_for(case):
    if case != "moe":
        return model_of(case)
    return ModelConfig(**(model_of("llama").model_dump() | MOE))


@pytest.mark.parametrize("case", CASES)
def test_sites_equal_one_device(case):
    sites, axes, options = CASES[case]
    with jax.enable_x64(True):
        model = model_for(case)
        batch = make_batch(model)
        device = make_mesh(devices=jax.devices()[:1])
        alone = OneProgram(model, StepPlan(device, policy("fp64")))
        islands = data_islands(model, sites, axes, ROWS // sites, **options)
        shares = np.split(np.arange(ROWS), sites)
        batches = [{name: leaf[share] for name, leaf in batch.items()} for share in shares]
        for _ in range(2):
            wanted = alone.step(batch)
            metrics = step_all(islands, batches)
        for own in metrics:
            assert own.pop("stop") == sites
            assert own.pop("save") == sites
            np.testing.assert_equal(own, metrics[0])
        wanted = {name: wanted[name] for name in metrics[0]}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), metrics[0], wanted)
        states = [island.whole() for island in islands]
        for state in states[1:]:
            jax.tree.map(np.testing.assert_array_equal, state, states[0])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13),
            states[0],
            alone.whole(),
        )
