"""Which format gradients have on the link, by what the config asks for and what carries them."""

import jax
import pytest

from geojax import make_mesh
from geojax.collectives import BFLOAT16, FLOAT32
from geojax.config.run_config import RunConfig
from geojax.planner.resolve.choices import resolved_plan
from geojax.runtime import platform
from geojax.settings import validate


def wire_of(**settings):
    content = {
        "run_directory": "unused",
        "steps": 1,
        "mesh": {"dc": 2},
        "model": "tiny",
        "data": {},
        "batch": {"global_batch_size": 2, "sequence_length": 8},
        "precision": "fp32",
    }
    config = validate(RunConfig, content | settings, "test")
    mesh = make_mesh(devices=jax.devices()[:2], dc=2)
    return resolved_plan(config, mesh).wire_format


def test_simulated_sites_sum_float32_as_it_is():
    assert wire_of() is None


@pytest.mark.parametrize(
    ("settings", "wire"),
    [
        ({}, FLOAT32),
        ({"communication": {"gradient_compression": "bf16"}}, BFLOAT16),
        ({"precision": "fp64"}, None),
        ({"zero": {"across_sites": True}}, None),
        ({"dc": {"role": "stage"}}, None),
    ],
)
def test_over_gloo_float32_travels_in_messages_of_our_own(settings, wire, monkeypatch):
    monkeypatch.setattr(platform, "_spans_processes", lambda mesh: True)
    assert wire_of(**settings) == wire
