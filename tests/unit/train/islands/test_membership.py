"""The record of who takes part, at a start at which sites are missing."""

import pytest

from geojax.config.run_config import RunConfig
from geojax.errors import FencedError, MissingProcessesError
from geojax.job.island_env import IslandSettings
from geojax.membership.file_store import FileRecordStore
from geojax.membership.record import MembershipRecord
from geojax.train.islands.membership import missing_for_a_reason

SITES = ("east", "mid", "west")
MISSING = MissingProcessesError("2 of 3 processes did not start", [0, 2])


def island_of(site):
    return IslandSettings(site=site, sites=SITES, coordinators=("127.0.0.1:6144",), key="k" * 32)


def config_of(path):
    lease = {"on_loss": "go_on", "lease": {"path": str(path)}} if path else {}
    return RunConfig.model_validate(
        {
            "run_directory": "runs/mine",
            "steps": 10,
            "mesh": {"dc": 3},
            "dc": {"join": "islands"},
            "islands": lease,
            "model": "tiny",
            "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
            "batch": {"global_batch_size": 6, "sequence_length": 32},
        }
    )


@pytest.mark.parametrize("site", ["mid", "west"])
def test_a_site_that_starts_alone_is_told_who_goes_on(site, tmp_path):
    path = tmp_path / "record.json"
    record = MembershipRecord(4, (0, 2), 2)
    FileRecordStore(path, "mine").create(record)
    error = missing_for_a_reason(MISSING, config_of(path), island_of(site))
    assert str(error) == (
        f"2 of 3 processes did not start. By {path} the run goes on without site mid (membership "
        "4), but no other site answers here"
    )
    assert isinstance(error, FencedError if site == "mid" else MissingProcessesError)


@pytest.mark.parametrize("content", [None, "", "{}", "of all"])
def test_another_start_says_no_more(content, tmp_path):
    path = tmp_path / "record.json"
    if content == "of all":
        FileRecordStore(path, "mine").create(MembershipRecord(4, (0, 1, 2), 2))
    elif content is not None:
        path.write_text(content)
    assert missing_for_a_reason(MISSING, config_of(path), island_of("mid")) is MISSING
    assert missing_for_a_reason(MISSING, config_of(None), island_of("mid")) is MISSING
