"""A site that starts asks whether the run goes on without it."""

import jax
import pytest
from support.ports import free_port

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.job.island_env import IslandSettings
from geojax.membership.file_store import FileRecordStore
from geojax.membership.record import MembershipRecord
from geojax.step.resolved import Layout, Step
from geojax.step.step_file import origin_of
from geojax.train.islands import running
from geojax.train.islands.running import RunningFacts, facts_of_running
from geojax.train.joined_sites import require_sites
from geojax.transport.door import Door
from geojax.transport.endpoint import ProcessOfSite

SITES = ("east", "mid", "west")
HERE = ProcessOfSite("here", "an endpoint")


@pytest.fixture
def doors():
    return tuple(f"127.0.0.1:{free_port()}" for _ in SITES)


def island_of(site, doors):
    return IslandSettings(
        site=site, sites=SITES, coordinators=doors, key="k" * 32, address="127.0.0.1"
    )


def config_of(path):
    return RunConfig.model_validate(
        {
            "run_directory": "runs/mine",
            "steps": 10,
            "mesh": {"dc": 3},
            "dc": {"join": "islands"},
            "islands": {"on_loss": "go_on", "lease": {"path": str(path)}},
            "model": "tiny",
            "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
            "batch": {"global_batch_size": 6, "sequence_length": 32},
        }
    )


def facts_of(config):
    layout = Layout(batch=config.batch, mesh=config.mesh)
    step = Step(layout=layout, origin=origin_of(config, None, [jax.devices()[0]] * 3))
    return RunningFacts.of(step, {"data": "sums"}, "0" * 32, 3, 18), step


def test_facts_are_told_at_a_door_as_they_are(doors, tmp_path):
    config = config_of(tmp_path / "record.json")
    FileRecordStore(tmp_path / "record.json", "mine").create(MembershipRecord(2, (1, 2), 1))
    facts, step = facts_of(config)
    door = Door(island_of("mid", doors), [HERE], facts.model_dump_json())
    try:
        told = facts_of_running(config, island_of("east", doors))
    finally:
        door.close()
    assert told == facts
    assert told.resolved() == step
    assert told.saved == {"data": "sums", "step": 3, "consumed_sequences": 18}


def test_another_version_is_named(doors, tmp_path):
    config = config_of(tmp_path / "record.json")
    FileRecordStore(tmp_path / "record.json", "mine").create(MembershipRecord(2, (1, 2), 1))
    door = Door(island_of("mid", doors), [HERE], "{}")
    try:
        with pytest.raises(UserError, match="another version of geojax"):
            facts_of_running(config, island_of("east", doors))
    finally:
        door.close()


def test_nobody_is_asked_before_the_first_start(doors, tmp_path, monkeypatch):
    monkeypatch.setattr(
        running, "ask_doors", lambda island, *place: pytest.fail("somebody was asked")
    )
    assert facts_of_running(config_of(tmp_path / "none.json"), island_of("east", doors)) is None


def test_a_member_asks_once_and_another_for_a_time(doors, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        running, "ask_doors", lambda island, *place: asked.append(island.site) or {}
    )
    monkeypatch.setattr(running, "_ASK_SECONDS", 0.05)
    config = config_of(tmp_path / "record.json")
    FileRecordStore(tmp_path / "record.json", "mine").create(MembershipRecord(2, (1, 2), 1))
    assert facts_of_running(config, island_of("mid", doors)) is None
    assert asked == ["mid"]
    assert facts_of_running(config, island_of("east", doors)) is None
    assert asked.count("east") > 1


def test_sites_that_may_return_know_all_doors(doors, tmp_path):
    config = config_of(tmp_path / "record.json")
    require_sites(config, island_of("east", doors))
    with pytest.raises(UserError, match="give that of process 0 of each site"):
        require_sites(config, island_of("east", doors[:1]))
