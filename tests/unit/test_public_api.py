"""The stable names: their list, that they come lazily, and that their examples run."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import geojax
from geojax.collectives import INT8

STABLE = [
    "Pipeline",
    "Schedule",
    "Topology",
    "Trainer",
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
    assert shown.stdout.strip() == "['geojax.lazy_names']", "by which names are imported later"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'mesh_of'"):
        _ = geojax.mesh_of


def test_the_examples_of_the_library_page_sum_gradients():
    page = Path(__file__).parents[2] / "docs" / "library.md"
    first, nnx = re.findall(r"```python\n(import jax\n.*?|from flax.*?)```", page.read_text(), re.S)
    names = {}
    exec(first + nnx, names)
    # [16, 4] twos for each of eight rows: 2 (x w) x = 32.
    np.testing.assert_allclose(names["grads"]["w"], 8 * 32, rtol=0.01)
    own = names["nnx_grads"]
    expected = jax.grad(names["squares"])(names["weights"], names["inputs"], names["targets"])
    assert jax.tree.structure(own) == jax.tree.structure(expected)
    for leaf, wanted in zip(*map(jax.tree.leaves, (own, expected)), strict=True):
        assert np.abs(leaf - wanted).max() <= np.abs(wanted).max() / 127
