"""The stable names: their list, that they come lazily, and that their examples run."""

import doctest
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import geojax
from geojax.collectives import INT8

STABLE = [
    "Pipeline",
    "Schedule",
    "Topology",
    "WireFormat",
    "all_gather",
    "all_reduce",
    "collective_traffic",
    "make_mesh",
    "reduce_scatter",
    "start_all_reduce",
]


def test_the_list_of_stable_names_changes_only_on_purpose():
    assert geojax.__all__ == STABLE


@pytest.mark.parametrize("name", STABLE)
def test_the_example_of_a_stable_name_prints_what_it_says(name):
    values = {"geojax": geojax, "jax": jax, "jnp": jnp, "P": jax.P, "INT8": INT8}
    values |= {each: getattr(geojax, each) for each in STABLE}
    example = doctest.DocTestParser().get_doctest(
        getattr(geojax, name).__doc__, values, name, None, None
    )
    assert example.examples, f"geojax.{name} has no example"
    doctest.DebugRunner().run(example)


def test_importing_geojax_starts_neither_jax_nor_another_module():
    program = (
        "import sys, geojax; print([m for m in sys.modules if m.startswith(('jax', 'geojax.'))])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'mesh_of'"):
        _ = geojax.mesh_of
