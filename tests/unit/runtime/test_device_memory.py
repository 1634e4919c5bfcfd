"""The memory that a program may fill, by accelerator, platform and environment."""

import os

import pytest

from geojax.accelerators import accelerator_named
from geojax.errors import UserError
from geojax.runtime.device_memory import (
    FRACTION_VARIABLES,
    take_memory_fraction,
    usable_memory,
)

H100 = accelerator_named("h100-sxm")
NEW, OLD = FRACTION_VARIABLES


@pytest.mark.parametrize(
    ("environment", "gigabytes"),
    [
        ({}, 72),
        ({NEW: "0.75"}, 60),
        ({OLD: "0.5"}, 40),
        ({NEW: "1"}, 76),  # NCCL and CUDA need some, whatever the pool's limit
        ({NEW: "0.5", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 76),  # there is no pool
    ],
)
def test_a_gpu_gives_its_pool_without_what_nccl_needs(environment, gigabytes):
    usable = usable_memory(H100, environment)
    assert usable.bytes == gigabytes * 10**9
    assert usable.of == "an h100-sxm's 80 GB"


def test_other_devices_give_all_of_what_is_known():
    assert usable_memory(accelerator_named("ascend-910b"), {NEW: "0.5"}).bytes == 64 * 10**9
    assert usable_memory(accelerator_named("simulated"), {}) is None


@pytest.mark.parametrize("given", ["half", "0", "1.5", "nan"])
def test_a_share_that_is_none_is_refused_with_its_variable(given):
    with pytest.raises(UserError, match=f"{NEW}={given}: .*above 0 and up to 1"):
        usable_memory(H100, {NEW: given})


@pytest.mark.parametrize("name", FRACTION_VARIABLES)
def test_a_share_of_the_user_stays(monkeypatch, name):
    for variable in FRACTION_VARIABLES:
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv(name, "0.6")
    take_memory_fraction("gpu")
    assert {variable: os.environ[variable] for variable in FRACTION_VARIABLES} == {
        variable: "0.6" if variable == name else "" for variable in FRACTION_VARIABLES
    }


def test_gpus_get_a_larger_share_than_by_default(monkeypatch):
    monkeypatch.setenv(NEW, "")
    monkeypatch.delenv(OLD, raising=False)
    take_memory_fraction("cpu")
    assert os.environ[NEW] == ""
    take_memory_fraction("gpu")
    assert os.environ[NEW] == "0.9"
