"""A step that holds each layer by itself: where it may be, where it is, and what it has."""

import jax
import pytest
from support.equality import assert_equal_gradients, on_layout

from geojax.config.layout import Layout
from geojax.models import ModelConfig
from geojax.planner.resolve.choices import MOST_UNROLLED_LAYERS, scans_layers
from geojax.runtime.platform import CPU, GPU

BATCH = {"global_batch_size": 8, "sequence_length": 16, "microbatches": 2}
MODEL = ModelConfig.load("llama3-8b")


def layout_with(**sections):
    return Layout.model_validate({"batch": BATCH} | sections)


def loops(layout, model=MODEL, platform=GPU):
    return scans_layers(layout, model, platform)


def test_programs_for_gpus_are_unrolled_where_nothing_travels_beside_layers():
    assert not loops(layout_with())
    assert not loops(layout_with(mesh={"data": 4}, zero={"stage": 1}))
    assert not loops(layout_with(mesh={"dc": 2}, dc={"join": "islands"}))
    stages = {"join": "islands", "role": "stage"}
    assert not loops(layout_with(mesh={"dc": 2, "stage": 2}, dc=stages))
    assert loops(layout_with(mesh={"dc": 2, "tensor": 2}, dc={"join": "islands"}))
    assert loops(layout_with(), platform=CPU)
    assert loops(layout_with(remat="full"))
    assert loops(layout_with(scan_layers=True))
    assert not loops(layout_with(scan_layers=False), platform=CPU)
    many = MODEL.replace(num_hidden_layers=MOST_UNROLLED_LAYERS + 1)
    assert loops(layout_with(), many)


LOOPS = {
    "mesh.tensor=2": {"mesh": {"tensor": 2}},
    "mesh.context=2": {"mesh": {"context": 2}},
    "mesh.expert=2": {"mesh": {"expert": 2}},
    "zero.stage=2": {"mesh": {"data": 4}, "zero": {"stage": 2}},
    "zero.stage=3": {"mesh": {"data": 4}, "zero": {"stage": 3}},
    "communication.overlap_grad_reduce": {"communication": {"overlap_grad_reduce": True}},
    "2 pipeline stages": {"mesh": {"stage": 2}},
}


@pytest.mark.parametrize("reason", LOOPS)
def test_what_needs_loops_has_them_or_says_so(reason):
    assert loops(layout_with(**LOOPS[reason]))
    with pytest.raises(ValueError, match=f"scan_layers=false cannot be with {reason}"):
        layout_with(scan_layers=False, **LOOPS[reason])


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_gradients_are_those_of_loops(zero_stage):
    with jax.enable_x64(True):
        losses, gradients = zip(
            *(
                on_layout(
                    "llama",
                    "fp64",
                    {"dc": 2, "data": 2, "tensor": 2},
                    2,
                    zero_stage=zero_stage,
                    scan_layers=scanned,
                )
                for scanned in (True, False)
            ),
            strict=True,
        )
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-13)
    assert_equal_gradients(gradients[1], gradients[0], 1e-12)
