"""The programs of three islands, compiled once for all tests of sites that go on."""

import pytest
from support.mortal_islands import DOOR_SECONDS, Islands

from geojax.precision import policy
from geojax.transport import door


@pytest.fixture(scope="session")
def islands():
    """Three sites in this process."""
    return Islands(dtypes=policy("fp32"), microbatches=2)


@pytest.fixture(autouse=True)
def quick_doors(monkeypatch):
    """Let the door of a site shut soon after it has died."""
    monkeypatch.setattr(f"{door.__name__}._SLICE_SECONDS", DOOR_SECONDS)
