"""The work of a layer whose weights are frozen, beside the same with all weights trained."""

import dataclasses

import pytest

from geojax.models import ModelConfig
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layer import LayerTimes
from geojax.planner.cost.layout import LayoutCandidate
from geojax.topology import Topology

BASE = ModelConfig.load("llama3-8b")
ADAPTED = BASE.replace(lora={"rank": 16})
LAYOUT = LayoutCandidate.made(sequence_length=4096, microbatches=4, mesh={"tensor": 2})


def times(model, layout=LAYOUT):
    (site, _) = Topology.load("two-h100-sites-2x8").sites
    return LayerTimes(model, layout, site, Calibration(), GEOJAX)


def by_name(pieces):
    return {piece.name: piece for piece in pieces}


def test_frozen_weights_have_no_gradients_and_adapters_do():
    base, adapted = (by_name(times(model).layer()) for model in (BASE, ADAPTED))
    products, adapters = adapted["matrix products"], adapted.pop("adapters")
    assert products == dataclasses.replace(base["matrix products"], weight=0.0)
    assert adapted["sums of gradients"].bytes < 0.01 * base["sums of gradients"].bytes
    assert list(adapted) == list(base)
    assert min(adapters.forward, adapters.backward, adapters.weight) > 0
    assert adapters.exposed < 0.2 * products.exposed  # ranks are short, and products with them slow


def test_frozen_ends_have_no_gradients():
    head, embedding = by_name(times(ADAPTED).head())["head"], times(ADAPTED).embedding()
    base = by_name(times(BASE).head())["head"]
    assert (head.forward, head.backward, head.weight) == (base.forward, base.backward, 0)
    assert embedding.weight == 0
    assert embedding.bytes == 0.4 * times(BASE).embedding().bytes


def test_a_backward_computes_adapters_again_with_its_layer():
    full = by_name(times(ADAPTED, LAYOUT.changed(remat="full")).layer())["adapters"]
    none = by_name(times(ADAPTED).layer())["adapters"]
    assert full.backward == pytest.approx(none.backward + none.forward)
    assert (full.forward, full.weight) == (none.forward, none.weight)
