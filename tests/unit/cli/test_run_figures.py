"""Figures of a run in words."""

import json

from geojax.cli.run_figures import (
    mesh_words,
    model_words,
    parts_of,
    run_words,
    site_figures,
)
from geojax.saved_runs.records.run_files import LocalFiles
from geojax.saved_runs.records.run_record import LIVE, RunRecord
from geojax.saved_runs.records.step_record import StepRecord


def test_a_run_by_its_config():
    config = {
        "mesh": {"dc": 2, "stage": 1, "data": 4},
        "model": {"num_hidden_layers": 4, "hidden_size": 192, "vocab_size": 4096},
        "precision": "fp32",
        "batch": {"global_batch_size": 8, "sequence_length": 128},
        "dc": {"join": "one_program"},
    }
    assert run_words(config) == [
        *("4 layers of 192, vocabulary 4096", "dc=2 x data=4", "fp32"),
        "8 x 128 tokens a step",
    ]
    assert mesh_words({"mesh": {"dc": 1}}) == "one device"
    assert model_words({"model": {"module": "mylab:build"}}) == "mylab:build"
    assert run_words({}) == run_words({"model": 5, "mesh": [], "batch": 1, "dc": "x"}) == []


def test_parts_are_means_of_the_last_steps():
    lines = [{"step": step, "seconds/data": 1.0} for step in range(100)]
    lines += [{"step": 100 + step, "seconds/data": 3.0} for step in range(20)]
    records = [StepRecord.of(line) for line in lines]
    assert parts_of(records) == {"data": 3.0}


def test_figures_of_another_site_grow_old(tmp_path):
    line = {"step": 1, "loss": 2.0, "seconds": 1.0, "time": 100.0, "site/west/age_seconds": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    record = RunRecord(LocalFiles(tmp_path), LIVE)
    record.poll()
    sites = site_figures(record, now=103.0)
    assert (sites["west"].record.age_seconds, sites["west"].is_late) == (5.0, False)
    sites = site_figures(record, now=120.0)
    assert (sites["west"].record.age_seconds, sites["west"].is_late) == (22.0, True)
    assert sites["this site"].record.age_seconds == 20.0
