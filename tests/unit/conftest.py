"""A mesh of simulated devices, and float64."""

import jax
import numpy as np
import pytest

from geojax.mesh import make_mesh


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
