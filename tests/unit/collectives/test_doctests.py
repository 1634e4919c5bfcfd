"""The examples in the docstrings of the public collectives run and print what they say."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import geojax
from geojax import collectives

MODULES = [
    f"geojax.collectives.{module.name}" for module in pkgutil.iter_modules(collectives.__path__)
]
WITH_EXAMPLES = {"WireFormat", "all_gather", "all_reduce", "reduce_scatter", "start_all_reduce"}
NAMES = {name: getattr(collectives, name) for name in collectives.__all__}
GLOBALS = {"geojax": geojax, "jax": jax, "jnp": jnp, "P": jax.sharding.PartitionSpec, **NAMES}


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in MODULES:
        for found in finder.find(importlib.import_module(name), extraglobs=GLOBALS):
            if found.examples:
                yield pytest.param(found, id=found.name.rpartition(".")[2])


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_prints_what_it_says(example):
    doctest.DebugRunner().run(example)


def test_every_public_collective_has_an_example():
    assert {example.id for example in examples()} >= WITH_EXAMPLES
