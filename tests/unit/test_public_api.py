"""The stable names: their list, that they come lazily, and that their examples run."""

import subprocess
import sys

import pytest

import geojax

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
def test_a_stable_name_can_be_imported_and_has_an_example(name):
    value = getattr(geojax, name)
    assert ">>>" in (value.__doc__ or ""), f"geojax.{name} has no example"


def test_importing_geojax_starts_neither_jax_nor_another_module():
    program = "import sys, geojax; print([m for m in sys.modules if m.startswith(('jax', 'geojax.'))])"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'mesh_of'"):
        _ = geojax.mesh_of
