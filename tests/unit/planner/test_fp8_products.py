"""Products of compiled programs that cannot be counted."""

import jax
import pytest
from support.plans import step_plan_on
from support.small_models import model_of

from geojax import make_mesh
from geojax.hlo import HloParseError
from geojax.planner.fp8_products import check_fp8_products, require_fp8_products
from geojax.precision import policy


class Unreadable:
    """A compiled program whose text is of an unknown form."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


@pytest.mark.parametrize("text", [None, "garbled"])
def test_fp8_products_are_not_counted_in_text_that_cannot_be_read(text):
    plan = step_plan_on(make_mesh(devices=jax.devices()[:4], dc=2, data=2), policy("fp32"))
    programs = [Unreadable(text)]
    with pytest.raises(HloParseError, match="HLO text"):
        require_fp8_products(programs, model_of("llama"), plan)
    assert check_fp8_products(programs, model_of("llama"), plan).startswith("HLO text")
