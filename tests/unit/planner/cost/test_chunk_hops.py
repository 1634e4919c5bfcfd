"""The messages between a pipeline's chunks, by the cost model."""

from geojax.models import ModelConfig
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.chunks import chunk_work, site_pieces
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layout import LayoutCandidate
from geojax.topology import Topology

MODEL = ModelConfig.load("llama3-8b")
TOPOLOGY = Topology.load("two-h100-sites-2x8")
THERE_AND_BACK = LayoutCandidate.made(
    sequence_length=4096,
    microbatches=8,
    mesh={"dc": 2, "stage": 2},
    dc={"role": "stage"},
    pipeline={"schedule": "zbv", "virtual_stages": 2},
)


def test_a_link_has_one_name_both_ways():
    sites = site_pieces(MODEL, THERE_AND_BACK, TOPOLOGY, Calibration(), GEOJAX)
    hops = chunk_work(MODEL, THERE_AND_BACK, TOPOLOGY, sites).costs.hops
    assert [hop.link for hop in hops] == [None, "east-west", None, None, None, "east-west", None]
    assert hops[3].seconds == 0  # to a chunk of the same stage
