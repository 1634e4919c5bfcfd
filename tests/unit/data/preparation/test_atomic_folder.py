"""Folders that are complete or not there."""

import pytest

from geojax.data.preparation.atomic_folder import atomic_folder
from geojax.errors import UserError
from geojax.file_lock import FileLock


def test_a_link_in_place_of_the_lock_is_refused(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("of somebody else")
    (tmp_path / ".made.lock").symlink_to(victim)
    with (
        pytest.raises(UserError, match=r"\.made\.lock: is a link"),
        atomic_folder(tmp_path / "made", wait=False),
    ):
        pass
    assert victim.read_text() == "of somebody else"


def test_a_folder_that_another_process_prepares_is_refused(tmp_path):
    lock = FileLock(tmp_path / ".made.lock")
    lock.take()
    with (
        pytest.raises(UserError, match="is being prepared by another process"),
        atomic_folder(tmp_path / "made", wait=False),
    ):
        pass
    lock.remove()
    with atomic_folder(tmp_path / "made", wait=False) as partial:
        (partial / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
