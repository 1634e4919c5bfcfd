"""The programs of three islands, compiled once for all tests of sites that go on."""

import pytest
from support.mortal_islands import Islands

from geojax.precision import policy


@pytest.fixture(scope="session")
def islands():
    """Three sites in this process."""
    return Islands(dtypes=policy("fp32"), microbatches=2)
