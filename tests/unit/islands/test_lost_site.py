"""A site that is lost while another one computes."""

import jax.numpy as jnp
import pytest
from support.islands import data_islands, shares, site_plans, stage_islands
from support.small_models import make_batch, model_of

from geojax.errors import RunError
from geojax.islands import walk
from geojax.pipeline import one_forward_one_backward
from geojax.precision import policy
from geojax.transport import MessageKey


def islands_of(role, model):
    plans = site_plans(2, {"data": 1}, policy("fp32"), microbatches=2)
    if role == "data":
        return data_islands(model, plans, chunks=1, held=2)
    return stage_islands(model, plans, one_forward_one_backward(2, 2))


@pytest.mark.parametrize("role", ["data", "stage"])
def test_the_others_end_while_their_devices_compute(role, monkeypatch):
    model = model_of("llama")
    own, other = islands_of(role, model)

    def compute_while_the_other_leaves(step):
        other.walk.transport.close()
        return False

    other.walk.transport.offer(0, MessageKey(0, "never fetched"), [jnp.zeros(1)])
    monkeypatch.setattr(walk._Step, "_devices_are_idle", compute_while_the_other_leaves)
    batch = make_batch(model)
    with pytest.raises(RunError, match="site 1 has left"):
        own.step(shares(batch, 2)[0] if role == "data" else batch)


def test_the_others_end_between_two_passes(monkeypatch):
    model = model_of("llama")
    own, other = islands_of("data", model)
    other.walk.transport.offer(0, MessageKey(0, "never fetched"), [jnp.zeros(1)])
    forward, forwards = walk._Step._forward, []

    def leave_after_the_first(step, action):
        forwards.append(action)
        forward(step, action)
        other.walk.transport.close()

    monkeypatch.setattr(walk._Step, "_forward", leave_after_the_first)
    with pytest.raises(RunError, match="site 1 has left"):
        own.step(shares(make_batch(model), 2)[0])
    assert len(forwards) == 1
