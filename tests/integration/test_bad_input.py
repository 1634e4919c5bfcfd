"""What is wrong ends in one line and exit code 2; nothing is lost and nothing half-written."""

import shutil
import signal

import pytest
from support.small_runs import (
    checkpoint_folders,
    finish,
    losses,
    start,
    train,
    wait_for_step,
    write_config,
)


def refusal(result):
    """The one line of a refused command."""
    assert result.returncode == 2, result.stdout + result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--optimiser.warmup_steps", "3"], "optimiser: unknown key; did you mean 'optimizer'?"),
        (
            ["--batch.global_batch_sizes=3"],
            "batch.global_batch_sizes: unknown key; did you mean 'global_batch_size'?",
        ),
        (
            ["--batch.global_batch_size", "-8"],
            "batch.global_batch_size: input should be greater than 0, not -8",
        ),
        (["--steps", "many"], "steps: input should be a valid integer"),
        (["--mesh.data", "5"], "does not divide over dc=2 x data=5"),
        (["--mesh.tensor", "3"], "heads 2 is not a multiple of it; tensor can be 1 or 2"),
        (
            ["--mesh.stage", "2", "--zero.stage", "2"],
            "zero.stage=2 requires one pipeline stage",
        ),
        (
            ["--model", "lama3-8b"],
            "no model preset is called 'lama3-8b'; did you mean 'llama3-8b'?",
        ),
        (["--batch.sequence_length", "64"], "batch.sequence_length=64 is longer than the model's"),
        (["--precision", "fp99"], "precision: input should be 'fp32', 'bf16', 'fp16'"),
        (["--simulate_devices", "4"], "dc=2 x data=4 makes 8 devices, but there are 4"),
        (["--topology", "simulated-3x2"], "dc must be 3"),
        (["--topology", "atlantis"], "no topology preset is called 'atlantis'"),
        (["--data.sources", "[{name: sums, prepared: nowhere}]"], "nowhere"),
        (["--model.vocab_size", "200"], "smaller than the tokenizer's"),
        (["steps", "3"], "expected an override such as"),
        (["--steps"], "--steps: a value is missing"),
        (["--resume"], "there is no checkpoint to resume from"),
    ],
)
def test_a_mistake_is_named_in_one_line(tmp_path, corpus, overrides, expected):
    config = write_config(tmp_path / "run.yaml", corpus)
    assert expected in refusal(train(config, *overrides))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_config_that_is_not_there_or_not_yaml(tmp_path):
    assert "no such file" in refusal(train(tmp_path / "none.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("steps: [1, 2\nmesh: {dc: 2}\n")
    assert "broken.yaml:2: not valid YAML" in refusal(train(broken))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, corpus):
    """A run with checkpoints at steps 5 and 10."""
    folder = tmp_path_factory.mktemp("saved")
    config = write_config(folder / "run.yaml", corpus, steps=10, checkpoint={"interval": 5})
    result = train(config)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "run"


@pytest.fixture
def run(saved, tmp_path):
    """A copy of that run, to be spoiled."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("damage", ["half-written", "corrupt"])
def test_a_spoiled_checkpoint_gives_way_to_the_newest_whole_one(run, saved, corpus, damage):
    newest = [folder for folder in checkpoint_folders(run) if folder.name == "10"]
    assert len(newest) == 2, "a part of each site, which holds the whole state"
    for part in newest:
        if damage == "half-written":
            (part / "manifest.json").unlink()
            continue
        largest = max(part.rglob("*"), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 0xFF
        largest.write_bytes(content)
    config = write_config(run.parent / "run.yaml", corpus, steps=10, checkpoint={"interval": 5})
    result = train(config)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step 10 is not whole" in result.stdout
    assert "resuming from step 5" in result.stdout
    assert losses(run) == losses(saved)


def test_no_whole_checkpoint_is_an_error_not_a_fresh_start(run, corpus):
    for folder in checkpoint_folders(run):
        (folder / "manifest.json").unlink()
    before = (run / "metrics.jsonl").read_bytes()
    line = refusal(train(write_config(run.parent / "run.yaml", corpus)))
    assert "holds no undamaged checkpoint" in line
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_model(run, corpus):
    config = write_config(run.parent / "run.yaml", corpus)
    line = refusal(train(config, "--model.num_hidden_layers", "3"))
    assert "num_hidden_layers" in line
    assert "2" in line
    assert "3" in line


def test_a_run_directory_in_use(run, corpus):
    config = write_config(
        run.parent / "run.yaml", corpus, steps=5000, evaluation={"interval": 5000}
    )
    process = start(config)
    wait_for_step(run, 11, process)
    line = refusal(train(config))
    assert f"is in use by process {process.pid}" in line
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert process.returncode == 143, "SIGTERM saves and stops too"
