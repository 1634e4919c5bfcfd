"""Configs are shown with their sources, compared, begun and described."""

import json
from pathlib import Path

import pytest
import yaml

from geojax.cli.main import run
from geojax.config.run_config import RunConfig

REPOSITORY = Path(__file__).parents[3]
CONFIGS = REPOSITORY / "configs"
COMMON = """\
run_directory: runs/x
steps: 10
model: {preset: tiny, num_hidden_layers: 2}
topology: simulated-2x4
simulate_devices: 8
mesh: {dc: 2, data: 4}
data: {}
batch: {global_batch_size: 8, sequence_length: 64}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "common.yaml").write_text(COMMON)
    (tmp_path / "run.yaml").write_text("base: common.yaml\nseed: 3\nremat: full\n")
    return tmp_path


def printed(capsys, *arguments):
    assert run(["config", *arguments]) == 0
    return capsys.readouterr().out


def source_of(text, key):
    lines = [line for line in text.splitlines() if line.strip().startswith(f"{key}: ")]
    at_the_top = [line for line in lines if line.startswith(key)]
    (line,) = at_the_top or lines
    return line.partition("# ")[2]


def test_a_shown_config_names_the_source_of_each_value(folder, capsys):
    text = printed(capsys, "show", "run.yaml", "--optimizer.warmup_steps", "7")
    assert max(map(len, text.splitlines())) <= 80
    expected = {
        "seed": "run.yaml:2",
        "steps": "common.yaml:2",
        "warmup_steps": "--optimizer.warmup_steps",
        "num_hidden_layers": "common.yaml:3",
        "hidden_size": "preset tiny",
        "norm_topk_prob": "default",
        "precision": "default",
        "overlap_grad_reduce": "default; here false",
        "hop_ticks": "default; here 1",
    }
    assert {key: source_of(text, key) for key in expected} == expected


def test_a_shown_config_is_one(folder, capsys):
    Path("shown.yaml").write_text(printed(capsys, "show", "run.yaml"))
    assert RunConfig.load(Path("shown.yaml")) == RunConfig.load(Path("run.yaml"))


def test_only_what_differs_is_compared(folder, capsys):
    text = printed(capsys, "diff", "common.yaml", "run.yaml")
    rows = [line.split() for line in text.splitlines()]
    assert rows == [
        ["key", "common.yaml", "run.yaml"],
        ["remat", "none", "full"],
        ["seed", "0", "3"],
    ]
    Path("run").mkdir()
    Path("run/config.yaml").write_text(COMMON)
    assert printed(capsys, "diff", "run", "common.yaml") == "the configs are the same\n"
    assert run(["config", "diff", "run.yaml", str(folder)]) == 2
    assert "holds no config.yaml" in capsys.readouterr().err


def test_two_shipped_configs_are_compared_within_the_width(folder, capsys):
    text = printed(
        capsys,
        "diff",
        str(CONFIGS / "llama3-70b-2x64.yaml"),
        str(CONFIGS / "llama3-70b-2x64-stage.yaml"),
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "mesh.stage" in text


@pytest.mark.parametrize("preset", ["tiny", "llama3-8b", "deepseek-v3-671b"])
def test_a_new_config_is_valid_and_readable(folder, capsys, preset):
    text = printed(capsys, "new", "--model", preset)
    assert max(map(len, text.splitlines())) <= 90
    Path("new.yaml").write_text(text)
    config = RunConfig.load(Path("new.yaml"))
    assert config.mesh.devices == 1
    assert text.count("#") > 10


def test_a_new_file_replaces_none(folder, capsys):
    out = printed(capsys, "new", "--output", "new.yaml")
    assert out == "new.yaml is written; geojax train new.yaml trains it\n"
    assert run(["config", "new", "--output", "new.yaml"]) == 2
    assert capsys.readouterr().err == "error: --output: new.yaml is there; name a new file\n"
    assert run(["config", "new", "--model", "tinny"]) == 2
    assert "did you mean 'tiny'?" in capsys.readouterr().err


def test_the_schema_has_every_key_and_accepts_what_a_config_may_hold(capsys):
    schema = json.loads(printed(capsys, "schema"))
    assert set(schema["properties"]) == {"base", *RunConfig.model_fields}
    assert schema["additionalProperties"] is False
    for reference in _references(schema):
        assert reference.removeprefix("#/$defs/") in schema["$defs"]
    for path in sorted(CONFIGS.glob("*.yaml")):
        content = yaml.safe_load(path.read_text())
        assert content.keys() <= schema["properties"].keys()


def _references(node):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)
