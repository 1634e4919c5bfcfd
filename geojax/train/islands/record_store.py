"""The store of the record of who takes part, as a run's config names it."""

from geojax.config.island_settings import LeaseSettings
from geojax.membership.file_store import FileRecordStore
from geojax.membership.record import RecordStore
from geojax.membership.s3_store import S3RecordStore


def record_store(lease: LeaseSettings, run: str) -> RecordStore:
    """Open the record of a run by its name.

    Raises:
        UserError: the client of the store is not installed.
    """
    if lease.path is not None:
        return FileRecordStore(lease.path, run)
    assert lease.s3 is not None, "a lease has a file or an object"
    return S3RecordStore(lease.s3, run)
