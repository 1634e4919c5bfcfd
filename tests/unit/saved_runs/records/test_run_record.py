"""A run's directory is followed: sites, attempts, configs, and a resume that drops steps."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.synthetic_runs import write_run

from geojax.errors import UserError
from geojax.saved_runs.records.run_files import LocalFiles
from geojax.saved_runs.records.run_record import LIVE, RunRecord

OLD_RUNS = Path(__file__).resolve().parents[3] / "data" / "old_runs"


@pytest.fixture(scope="module")
def islands(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "islands")


def test_sites_of_islands(islands):
    record = RunRecord.read(islands)
    assert record.main_site == "east"
    assert sorted(record.sites) == ["east", "west"]
    main = record.main
    assert (main.latest.step, main.steps, main.has_ended) == (2000, 2000, True)
    assert [attempt.outcome for attempt in main.attempts] == ["killed", "killed", "end"]
    assert main.goodput.seconds["lost"] == pytest.approx(900 + 240)
    assert main.goodput.seconds["recomputed"] > 0
    assert set(main.validation) == {"books", "code"}
    assert main.earlier_configs[1]["optimizer"]["peak_learning_rate"] == 4e-4
    assert main.planned.step_seconds.value == 7.1
    assert main.unreadable_lines == 0


def test_one_site_alone(islands):
    record = RunRecord.read(islands / "west")
    assert (record.main_site, record.main.latest.step) == (None, 2000)
    assert list(record.main.latest.links) == ["east"]


def test_a_run_that_goes_on_and_resumes(tmp_path, islands):
    folder = tmp_path / "run"
    record = RunRecord(LocalFiles(folder), LIVE)
    assert not record.poll()
    assert not record.is_there
    folder.mkdir()
    lines = (islands / "east" / "metrics.jsonl").read_text().splitlines(keepends=True)
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(lines[:100]))
    shutil.copy(islands / "east" / "config.yaml", folder)
    assert record.poll()
    assert (record.main.latest.step, record.main.has_ended) == (100, False)
    metrics.write_text("".join(lines[:60]))
    assert record.poll()
    assert (record.main.latest.step, record.main.steps_seen) == (60, 60)
    now = {"attempt": 2, "began": 1000.0, "seconds": {"productive": 40.0, "starting": 10.0}}
    (folder / "goodput-now.json").write_text(json.dumps(now))
    assert record.poll()
    assert record.main.goodput.productive_share == pytest.approx(0.8)
    assert not record.poll()


def test_a_run_that_was_extended_has_not_ended(tmp_path):
    events = [{"kind": "start"}, {"kind": "end"}, {"kind": "resume"}]
    for count, ended in ((1, False), (2, True), (3, False)):
        text = "".join(json.dumps(event) + "\n" for event in events[:count])
        (tmp_path / "events.jsonl").write_text(text)
        record = RunRecord(LocalFiles(tmp_path), LIVE)
        record.poll()
        assert record.main.has_ended is ended


def test_an_old_run(tmp_path):
    with tarfile.open(OLD_RUNS / "llama.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    record = RunRecord.read(tmp_path / "llama")
    assert (record.main.latest.step, record.main.goodput) == (2, None)
    assert record.main.has_ended


def test_no_run(tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl with a step of a run"):
        RunRecord.read(tmp_path)


def test_records_are_read_without_jax():
    code = "import sys, geojax.saved_runs.records.run_record as r; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
