"""Bytes a weight that sums of gradients move, by how a pipeline's program adds them."""

import pytest

from geojax.models import ModelConfig
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layer import LayerTimes
from geojax.planner.cost.layout import LayoutCandidate
from geojax.topology import Topology

LAYERS = 16
MODEL = ModelConfig.load("llama3-70b").replace(num_hidden_layers=LAYERS)
TURN = 2 * 2 * 2
"""Bytes of copying the weights of a chunk for both passes, in 16 bits."""


def bytes_of_sums(stages, *, virtual=None, precision="bf16"):
    """The bytes of a layer's sums, for each of its weights."""
    virtual = LAYERS // stages if virtual is None else virtual
    layout = LayoutCandidate.made(
        sequence_length=4096,
        microbatches=4 * stages,
        mesh={"dc": 2, "stage": stages, "tensor": 8},
        parallelism={"sequence": True},
        pipeline={"schedule": "interleaved", "virtual_stages": virtual},
        precision=precision,
    )
    site = Topology.load("two-h100-sites").sites[0]
    times = LayerTimes(MODEL, layout, site, Calibration(), GEOJAX)
    (sums,) = [each for each in times.layer() if each.name == "sums of gradients"]
    weights = sum(each.count * each.inner * each.columns for each in times.products())
    return sums.bytes / weights


def test_products_add_to_the_sums_of_a_chunk_that_is_put_back_where_a_stage_turns():
    assert bytes_of_sums(4) == pytest.approx(4 + (TURN + 16) / 4)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"stages": 2}, 10 + TURN / 2),
        ({"stages": 4, "precision": "fp8-current"}, 10 + TURN / 4),
        ({"stages": 4, "virtual": 2}, 10),
    ],
    ids=["two stages", "fp8", "chunks of two layers"],
)
def test_else_a_pass_over_the_stack_adds_them(layout, expected):
    assert bytes_of_sums(**layout) == pytest.approx(expected)
