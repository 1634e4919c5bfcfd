import types

import jax
import pytest

from geojax.accelerators import CATALOG, accelerator_named, accelerator_of
from geojax.errors import UserError


def test_published_figures_of_the_h100():
    h100 = accelerator_named("h100-sxm")
    assert h100.peak("bfloat16") == 989e12
    assert h100.peak("float8_e4m3fn") == h100.peak("float8_e5m2") == 1979e12
    assert h100.memory_bytes == 80e9
    assert h100.memory_bytes_per_second == 3.35e12


def test_every_entry_is_filed_under_its_name_and_no_kind_is_claimed_twice():
    assert all(name == entry.name for name, entry in CATALOG.items())
    kinds = [kind for entry in CATALOG.values() for kind in entry.device_kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA B200", "b200-sxm"),
    ],
)
def test_a_device_is_found_by_how_jax_names_it(kind, name):
    assert accelerator_of(types.SimpleNamespace(device_kind=kind)).name == name


def test_a_simulated_device_has_no_peak_and_an_unknown_one_no_entry():
    assert accelerator_of(jax.devices()[0]).peak("float32") is None
    assert accelerator_of(types.SimpleNamespace(device_kind="abacus")) is None


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'h100-sxm'"):
        accelerator_named("h100-sxn")
