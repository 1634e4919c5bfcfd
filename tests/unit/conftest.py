"""Unit tests compile in a hurry."""

import os

import jax
import numpy as np
import pytest
from support.xla_flags import LESS

from geojax.mesh import make_mesh

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {LESS}"


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def mesh_of():
    """A mesh of the given axis sizes over the first simulated devices."""

    def build(**sizes):
        count = int(np.prod(list(sizes.values())))
        return make_mesh(devices=jax.devices()[:count], **sizes)

    return build
