"""The settings of trackers, and what is refused before a device is touched."""

import pydantic
import pytest

from geojax.errors import UserError
from geojax.settings import Settings, validate
from geojax.trackers import tracker_settings
from geojax.trackers.tracker_settings import (
    AnyTracker,
    MlflowSettings,
    OtlpSettings,
    OwnTracker,
    WandbSettings,
    arguments_of,
    refuse_unusable,
)

COLLECTOR = "http://127.0.0.1:4318/v1/metrics"
TOKEN = [{"name": "x-token", "variable": "GEOJAX_TOKEN"}]


class Listed(Settings):
    trackers: tuple[AnyTracker, ...]


def read(*trackers):
    return validate(Listed, {"trackers": trackers}, "run.yaml").trackers


def test_names_classes_and_mappings_are_read_and_written_back():
    given = (
        "jsonl",
        {"name": "tensorboard"},
        "wandb",
        {"name": "mlflow", "uri": "sqlite:///x.db"},
        {"name": "otlp", "endpoint": COLLECTOR, "headers": TOKEN},
        "mylab.tracking:Tracker",
        {"module": "mylab.tracking:Other", "rate": 3, "name": "x"},
    )
    trackers = read(*given)
    assert trackers[:2] == ("jsonl", "tensorboard")
    assert list(map(type, trackers[2:6])) == [
        WandbSettings,
        MlflowSettings,
        OtlpSettings,
        OwnTracker,
    ]
    assert arguments_of(trackers[6]) == {"rate": 3, "name": "x"}
    assert arguments_of(trackers[3]) == {"uri": "sqlite:///x.db", "experiment": "geojax"}
    assert len({hash(tracker) for tracker in trackers}) == 7, "a config is a key of caches"
    written = Listed(trackers=trackers).model_dump(mode="json")["trackers"]
    assert read(*written) == trackers


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("wandbb", "trackers.0: there is no tracker 'wandbb'; did you mean 'wandb'?"),
        (3, "trackers.0: must be a name, module:Class, or a mapping with `name` or `module`"),
        ({"name": "jsonl", "path": "x"}, "trackers.0: jsonl has no settings"),
        ({"name": "wandb", "projct": "x"}, "trackers.0.projct: unknown key"),
        ({"name": "otlp"}, "trackers.0.endpoint: is required and missing"),
        ({"name": "otlp", "endpoint": "localhost:4318"}, "trackers.0.endpoint: 'localhost:4318'"),
        ("mylab tracking:X", "trackers.0.module: string should match pattern"),
        ({"module": "os"}, "trackers.0.module: string should match pattern"),
    ],
)
def test_a_mistake_is_one_line(tracker, message):
    with pytest.raises(UserError) as refusal:
        read(tracker)
    assert str(refusal.value).startswith(f"run.yaml: {message}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "tracker",
    [
        {"name": "mlflow", "uri": "postgresql://me:hidden@db/mlflow"},
        {"name": "otlp", "endpoint": "https://me:hidden@collector/v1/metrics"},
        {"name": "wandb", "url": "https://me:hidden@wandb"},
    ],
)
def test_a_password_is_refused_and_not_shown(tracker):
    with pytest.raises(UserError, match="holds a password") as refusal:
        read(tracker)
    assert "hidden" not in str(refusal.value)


@pytest.mark.parametrize(
    ("tracker", "name"),
    [
        ("wandb", "wandb"),
        ({"name": "mlflow", "uri": "sqlite:///x.db"}, "mlflow"),
        ({"name": "otlp", "endpoint": COLLECTOR}, "otlp"),
    ],
)
def test_a_missing_package_is_refused_with_the_command_that_installs_it(tracker, name, monkeypatch):
    monkeypatch.setattr(tracker_settings.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError) as refusal:
        refuse_unusable(("jsonl", *read(tracker)))
    assert str(refusal.value) == (
        f"trackers: {name} requires packages that are not installed; pip install "
        f"'geojax-trainer[{name}]'"
    )


def test_a_missing_variable_is_refused(monkeypatch):
    monkeypatch.setattr(tracker_settings, "_is_installed", lambda package: True)
    for name in ("MLFLOW_TRACKING_URI", "GEOJAX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="set uri, or the variable MLFLOW_TRACKING_URI"):
        refuse_unusable(read("mlflow"))
    headers = {"name": "otlp", "endpoint": COLLECTOR, "headers": TOKEN}
    with pytest.raises(UserError, match="GEOJAX_TOKEN, which is not set"):
        refuse_unusable(read(headers))


def test_a_class_that_cannot_be_imported_is_refused(monkeypatch):
    monkeypatch.setattr(tracker_settings, "check_class", lambda name: f"no {name}")
    with pytest.raises(UserError, match=r"trackers: a:B cannot be used \(no a:B\); a class with"):
        refuse_unusable(read("a:B"))


def test_settings_are_frozen():
    with pytest.raises(pydantic.ValidationError):
        read("wandb")[0].project = "other"
