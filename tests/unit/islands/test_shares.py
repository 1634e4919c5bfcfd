"""Sites that compute the shares of others that are lost keep every bit of the run."""

import dataclasses

import jax
import numpy as np
import pytest
from support.islands import data_islands, shares, site_plans, step_all
from support.small_models import make_batch, model_of

from geojax.collectives import INT8

CASES = {
    # Sites, axes of a site, order, options, and the shares of each site after a loss.
    "gpt3": (
        2,
        {"data": 2, "tensor": 2},
        {"chunks": 2, "held": 2},
        {"microbatches": 3},
        [(), (1, 0)],
    ),
    "llama": (
        3,
        {"data": 2},
        {"chunks": 3, "held": 2},
        {"microbatches": 2, "zero_stage": 3},
        [(0, 2), (1,), ()],
    ),
    "nemotron": (3, {"data": 1}, {"chunks": 2, "held": 1}, {}, [(0, 1, 2), (), ()]),
}


def trained(case, of_steps, **changes):
    """The metrics and the state of a site that is left, after steps with these shares each."""
    sites, axes, order, options, _ = CASES[case]
    model = model_of(case)
    batches = shares(make_batch(model), sites)
    plans, state = site_plans(sites, axes, **options, **changes), None
    for of_sites in of_steps:
        islands = data_islands(model, plans, of_sites=of_sites, **order)
        left = [(island, own) for island, own in zip(islands, of_sites, strict=True) if own]
        if state is not None:
            for island, _ in left:
                island.state = state[island.walk.transport.site]
        metrics = step_all(
            [island for island, _ in left], [[batches[share] for share in own] for _, own in left]
        )
        state = {island.walk.transport.site: island.state for island, _ in left}
    whole = [dataclasses.replace(island.whole(), error_feedback=None) for island, _ in left]
    for other in whole[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, whole[0])
    return metrics[0], whole[0]


@pytest.mark.parametrize("case", CASES)
def test_a_step_without_a_site_has_the_same_bits(case):
    sites, *_, after = CASES[case]
    all_sites = [(site,) for site in range(sites)]
    with jax.enable_x64(True):
        wanted, state = trained(case, [all_sites, all_sites])
        metrics, mine = trained(case, [all_sites, after])
    assert metrics.keys() == wanted.keys()
    for name in wanted.keys() - {"stop", "save"}:
        assert metrics[name] == wanted[name], name
    jax.tree.map(np.testing.assert_array_equal, mine, state)


def test_a_lost_site_takes_its_rounding_errors_with_it():
    *_, after = CASES["llama"]
    with jax.enable_x64(True):
        first, _ = trained("llama", [[(0,), (1,), (2,)]], wire_format=INT8)
        steps = [[(0,), (1,), (2,)], after]
        wanted, _ = trained("llama", [steps[0], steps[0]], wire_format=INT8)
        metrics, _ = trained("llama", steps, wire_format=INT8)
    assert metrics["loss"] == wanted["loss"] != first["loss"]  # computed before errors are sent
    assert metrics["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-2)
