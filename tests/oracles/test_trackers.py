"""Metrics that other libraries read back: wandb offline, MLflow's database, a collector of OTLP."""

import contextlib
import http.server
import importlib.util
import json
import math
import struct
import threading

import pytest

from geojax.checkpoint import RunDirectory
from geojax.trackers.tracker_settings import MlflowSettings, OtlpHeader, OtlpSettings, WandbSettings
from geojax.train.run_trackers import RunTrackers
from geojax.train.writing.background_writer import BackgroundWriter

BLOCK, FULL, LAST = 1 << 15, 1, 4
"""Bytes of a block of LevelDB's log, and kinds of the pieces that end a record."""


def needs(package):
    is_there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed")


def track(folder, tracker, first, last):
    """Track the steps of a run that goes on after `first`; return what it warned of."""
    directory, lines = RunDirectory(folder), []
    with (
        BackgroundWriter(folder, lines.append) as files,
        RunTrackers((tracker,), directory, files, lines.append, closing_seconds=200.0) as trackers,
    ):
        trackers.start("run", {"seed": 7, "mesh": {"dc": 2}}, first, "east")
        for step in range(first + 1, last + 1):
            trackers.log(step, {"loss": 1 / step, "mfu": math.nan})
            trackers.log(step, {"validation/a b": 2.0})
        trackers.exit_code = 0 if last == 5 else 130
    assert lines[1:] == [], lines


def kept_id(folder):
    return json.loads((folder / "trackers" / "run.json").read_text())["id"]


def records_of(file):
    """Read the records of a .wandb file, which is a log of LevelDB behind seven bytes."""
    content, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:  # no record begins here
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 :][:length]
        place += 7 + length
        if kind in (FULL, LAST):
            yield whole
            whole = b""


@needs("wandb")
def test_wandb_has_each_step_in_the_files_of_one_run(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    tracker = WandbSettings(mode="offline", project="sums", group="pair", tags=("one",))
    track(tmp_path, tracker, 0, 4)
    track(tmp_path, tracker, 3, 5)
    folders = sorted((tmp_path / "trackers" / "wandb").glob("offline-run-*"))
    records = []
    for folder in folders:
        assert folder.name.endswith(kept_id(tmp_path))
        (file,) = folder.glob("*.wandb")
        records += map(Record.FromString, records_of(file))
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.run_id, run.project, run.display_name, run.run_group) for run in runs} == {
        (kept_id(tmp_path), "sums", "run", "pair")
    }
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert (config["seed"], config["mesh"]) == (7, {"dc": 2})
    histories = [record.history for record in records if record.HasField("history")]
    rows = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in history.item}
        for history in histories
    ]
    assert [row["_step"] for row in rows] == [1, 2, 3, 4, 4, 5], "a row a step"
    assert [row["loss"] for row in rows] == [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 4, 1 / 5]
    assert all(row["validation/a b"] == 2.0 for row in rows)
    exits = [record.exit.exit_code for record in records if record.HasField("exit")]
    assert exits == [130, 0]


@needs("mlflow")
def test_mlflow_goes_on_in_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = MlflowSettings(uri=uri, experiment="sums")
    track(tmp_path / "run", tracker, 0, 4)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("sums").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "KILLED"
    track(tmp_path / "run", tracker, 3, 5)
    (run,) = client.search_runs([experiment])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.tags["geojax.run"] == kept_id(tmp_path / "run")
    assert run.data.params == {"seed": "7", "mesh.dc": "2"}
    points = client.get_metric_history(run.info.run_id, "loss")
    found = sorted((point.step, point.value) for point in points)
    assert found == [(step, 1 / step) for step in (1, 2, 3, 4, 4, 5)]
    assert math.isnan(client.get_metric_history(run.info.run_id, "mfu")[0].value)
    assert len(client.get_metric_history(run.info.run_id, "validation/a b")) == 6


@contextlib.contextmanager
def collector(bodies):
    """Receive requests at a port of this host, with the header that they bring."""

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, self.headers["x-token"], content))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/metrics"
        server.shutdown()
        thread.join()


@needs("opentelemetry.exporter")
def test_a_collector_gets_gauges_with_run_site_and_step(tmp_path, monkeypatch):
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    monkeypatch.setenv("SUMS_TOKEN", "open")
    bodies = []
    with collector(bodies) as endpoint:
        header = OtlpHeader(name="x-token", variable="SUMS_TOKEN")
        tracker = OtlpSettings(endpoint=endpoint, headers=(header,))
        track(tmp_path, tracker, 0, 2)
    assert {body[:2] for body in bodies} == {("/v1/metrics", "open")}
    points = []
    for _, _, content in bodies:
        (sent,) = ExportMetricsServiceRequest.FromString(content).resource_metrics
        service = {each.key: each.value.string_value for each in sent.resource.attributes}
        assert service["service.name"] == "geojax"
        assert service["service.instance.id"] == kept_id(tmp_path)
        for metric in sent.scope_metrics[0].metrics:
            (point,) = metric.gauge.data_points
            assert point.time_unix_nano > 0
            found = {each.key: each.value for each in point.attributes}
            assert found["run"].string_value == "run"
            assert found["site"].string_value == "east"
            points.append((metric.name, found["step"].int_value, point.as_double))
    assert [point for point in points if point[0] != "geojax.mfu"] == [
        ("geojax.loss", 1, 1.0),
        ("geojax.validation/a b", 1, 2.0),
        ("geojax.loss", 2, 0.5),
        ("geojax.validation/a b", 2, 2.0),
    ]
