"""The bytes over dc of a compiled step beside the prediction, and without a readable program."""

import jax
import pytest
from support.plans import step_plan_on
from support.small_models import model_of
from support.step_traffic import traced_step

from geojax import make_mesh
from geojax.hlo import HloParseError
from geojax.planner.cross_site import cross_site_bytes
from geojax.precision import policy
from geojax.step.program import require_fp8_products


class Unreadable:
    """A compiled program whose text is of an unknown form."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


@pytest.fixture(scope="module")
def step():
    """A plan for two sites of two devices, its step, and the step's collectives."""
    plan = step_plan_on(make_mesh(devices=jax.devices()[:4], dc=2, data=2), policy("fp32"))
    return plan, *traced_step(model_of("llama"), plan, 8, 16)


def test_a_compiled_step_sends_what_was_predicted(step):
    plan, traced, traffic = step
    found = cross_site_bytes(traffic, plan, traced.lower().compile())
    assert found.compiled == found.predicted == found.bytes > 0
    assert "over dc, compiled " in str(found)


@pytest.mark.parametrize("text", ["", None, "garbled", "HloModule m, entry\n\nENTRY %e {\n  x"])
def test_text_that_cannot_be_read_leaves_the_prediction(step, text):
    plan, _, traffic = step
    found = cross_site_bytes(traffic, plan, Unreadable(text))
    assert found.compiled is None
    assert found.bytes == found.predicted > 0
    assert found.unreadable.startswith("HLO text: ")
    assert "compiled" not in str(found)


@pytest.mark.parametrize("text", [None, "garbled"])
def test_fp8_products_are_not_counted_in_text_that_cannot_be_read(step, text):
    plan, *_ = step
    with pytest.raises(HloParseError, match="HLO text"):
        require_fp8_products([Unreadable(text)], model_of("llama"), plan)
