"""The record at a start at which all sites have met."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from geojax.islands.going_on.steps import record_of_start
from geojax.membership.file_store import FileRecordStore
from geojax.membership.record import MembershipRecord
from geojax.transport import loopback


@pytest.fixture
def store(tmp_path):
    return FileRecordStore(tmp_path / "record.json", "run")


def start(store, saved_under=0):
    (transport,) = loopback(1)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return record_of_start(store, "record.json", transport, mesh, saved_under)


def test_each_start_that_follows_a_save_has_a_later_record(store):
    assert start(store) == MembershipRecord(1, (0,), 0)
    assert start(store, saved_under=1) == MembershipRecord(2, (0,), 0)
    assert start(store, saved_under=2) == MembershipRecord(3, (0,), 0)
    assert start(store, saved_under=1) == MembershipRecord(4, (0,), 0)


def test_the_record_of_a_new_store_is_later_than_that_of_the_save(store):
    assert start(store, saved_under=7) == MembershipRecord(8, (0,), 0)
    assert store.read() == MembershipRecord(8, (0,), 0)
