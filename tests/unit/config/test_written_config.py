"""A config on top of its bases, with the place of each value."""

from pathlib import Path

import pytest

from geojax.cli.main import run
from geojax.cli.plan_request import is_run
from geojax.config.run_config import RunConfig
from geojax.config.written_config import MOST_BASES, written_config
from geojax.errors import UserError

COMMON = """\
run_directory: runs/x
steps: 10
model: tiny
data: {}
batch: {global_batch_size: 8, sequence_length: 64}
optimizer:
  peak_learning_rate: 1.0e-3
  warmup_steps: 5
sample: {prompts: [a, b, c]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "common.yaml").write_text(COMMON)
    return tmp_path


def write(name, text):
    Path(name).write_text(text)
    return Path(name)


def test_mappings_merge_and_lists_replace(folder):
    path = write(
        "run.yaml",
        "base: shared/common.yaml\nsteps: 20\noptimizer: {warmup_steps: 2}\n"
        "sample: {prompts: [d]}\n",
    )
    written = written_config(path, ["--batch.microbatches", "2"])
    assert written.content["optimizer"] == {"peak_learning_rate": 1e-3, "warmup_steps": 2}
    assert written.content["sample"] == {"prompts": ["d"]}
    assert "base" not in written.content
    places = {key: str(written.origins.of(tuple(key.split(".")))) for key in ("steps", "model")}
    assert places == {"steps": "run.yaml:2", "model": "shared/common.yaml:3"}
    assert str(written.origins.of(("optimizer", "peak_learning_rate"))) == "shared/common.yaml:7"
    assert str(written.origins.of(("batch", "microbatches"))) == "--batch.microbatches"
    assert ("sample", "prompts", "1") not in written.origins.places


def test_a_base_is_found_beside_the_file_that_names_it(folder):
    write("shared/middle.yaml", "base: common.yaml\nseed: 3\n")
    config = RunConfig.load(write("run.yaml", "base: shared/middle.yaml\nsteps: 7\n"))
    assert (config.seed, config.steps, config.optimizer.warmup_steps) == (3, 7, 5)


def test_a_resolved_config_has_no_base(folder):
    config = RunConfig.load(write("run.yaml", "base: shared/common.yaml\n"))
    assert "base" not in config.model_dump(mode="json")
    assert config == RunConfig.load(folder / "shared" / "common.yaml")


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("{num_hidden_layers: 2}", 2),
        ("{preset: tiny, num_hidden_layers: 3}", 3),
        ("tiny", 6),
    ],
)
def test_changes_of_a_model_are_put_into_the_bases_preset(folder, model, layers):
    config = RunConfig.load(write("run.yaml", f"base: shared/common.yaml\nmodel: {model}\n"))
    assert config.model.num_hidden_layers == layers
    assert config.model.hidden_size == 256


def test_a_model_that_says_what_it_is_replaces_the_bases(folder):
    text = "base: shared/common.yaml\nmodel: {module: mylab:build, width: 3}\n"
    assert written_config(write("run.yaml", text)).content["model"] == {
        "module": "mylab:build",
        "width": 3,
    }


def test_a_mistake_has_the_line_of_its_own_file(folder):
    path = write("run.yaml", "base: shared/common.yaml\nlr: 1\n")
    Path("shared/common.yaml").write_text(COMMON.replace("warmup_steps", "warmup"))
    with pytest.raises(UserError) as caught:
        RunConfig.load(path, ["--tp=2"])
    assert sorted(caught.value.lines) == [
        "--tp: unknown key; in geojax it is mesh.tensor",
        "run.yaml:2: lr: unknown key; in geojax it is optimizer.peak_learning_rate",
        "shared/common.yaml:8: optimizer.warmup: unknown key; in geojax it is "
        "optimizer.warmup_steps",
    ]


def test_a_mistake_of_values_together_has_the_line_of_the_first(folder):
    path = write("run.yaml", "base: shared/common.yaml\nmesh: {data: 3}\n")
    with pytest.raises(UserError, match=r"^shared/common.yaml:5: batch.global_batch_size=8 does"):
        RunConfig.load(path)
    with pytest.raises(UserError, match=r"^--batch.global_batch_size=4 does not divide"):
        RunConfig.load(path, ["--batch.global_batch_size=4"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: none.yaml\n", "run.yaml:1: base: none.yaml: no such file"),
        ("steps: 1\nbase: shared\n", "run.yaml:2: base: shared: is a folder; a YAML file would do"),
        ("base: run.yaml\n", "a file stands on itself (run.yaml -> run.yaml); leave one base out"),
        ("base: [a, b]\n", "run.yaml:1: base: expected the path of a YAML file"),
        ("base: $HOME/a.yaml\n", "run.yaml:1: base: '$HOME/a.yaml' holds the variable $HOME"),
        ("base: shared/broken.yaml\n", "shared/broken.yaml:3: not valid YAML"),
        ("base: shared/circle.yaml\n", "shared/circle.yaml:1: base: a file stands on itself"),
        ("base: shared/far.yaml\n", "shared/far.yaml:1: base: shared/none.yaml: no such file"),
    ],
)
def test_a_base_that_cannot_be_is_refused_in_a_line(folder, text, message):
    write("shared/broken.yaml", "a: 1\nb: [\n")
    write("shared/circle.yaml", "base: ../run.yaml\n")
    write("shared/far.yaml", "base: none.yaml\n")
    with pytest.raises(UserError) as caught:
        written_config(write("run.yaml", text))
    assert message in str(caught.value)
    assert len(caught.value.lines) == 1


def test_a_tower_of_bases_has_an_end(folder):
    for number in range(MOST_BASES + 1):
        write(f"{number}.yaml", f"base: {number + 1}.yaml\n")
    write(f"{MOST_BASES + 1}.yaml", COMMON)
    assert written_config(Path("1.yaml")).content["steps"] == 10
    with pytest.raises(UserError, match=rf"base: is number {MOST_BASES + 1}; up to {MOST_BASES}"):
        written_config(Path("0.yaml"))


def test_only_a_file_names_its_base(folder):
    with pytest.raises(UserError, match=r"^--base: only a file names its base"):
        written_config(Path("shared/common.yaml"), ["--base=x.yaml"])


def test_commands_take_a_config_that_has_nothing_but_a_base(folder, capsys):
    path = write("run.yaml", "base: none.yaml\n")
    assert is_run(path)
    for command in (["train"], ["plan"], ["config", "show"], ["probe"]):
        assert run([*command, "run.yaml"]) == 2
        assert capsys.readouterr().err == "error: run.yaml:1: base: none.yaml: no such file\n"
