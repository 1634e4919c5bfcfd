"""Settings of islands that go on."""

import pytest

from geojax.config.island_settings import LeaseSettings
from geojax.errors import UserError
from geojax.membership.file_store import FileRecordStore
from geojax.settings import validate
from geojax.train.islands.membership import record_store


@pytest.mark.parametrize(
    ("lease", "wrong"),
    [
        ({}, "the record lies in one place; give path or s3"),
        ({"path": "record", "s3": "s3://runs/record"}, "the record lies in one place"),
        ({"s3": "runs/record"}, "s3"),
        ({"s3": "s3://runs"}, "s3"),
    ],
)
def test_a_record_has_one_place(lease, wrong):
    with pytest.raises(UserError, match=wrong):
        validate(LeaseSettings, lease, "lease")


def test_the_place_opens_its_store(tmp_path):
    lease = validate(LeaseSettings, {"path": str(tmp_path / "record")}, "lease")
    store = record_store(lease, "run")
    assert isinstance(store, FileRecordStore)
    assert store.path == tmp_path / "record"
    assert lease.place == str(tmp_path / "record")
    assert validate(LeaseSettings, {"s3": "s3://runs/record"}, "lease").place == "s3://runs/record"
