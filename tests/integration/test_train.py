"""Whole runs of `geojax train`, as a user starts, stops, kills and resumes them."""

import json
import math
import re
import shutil
import signal

import numpy as np
import pytest
import yaml
from support.small_runs import (
    assert_as_near,
    finish,
    losses,
    remove_checkpoint,
    saved_steps,
    start,
    start_processes,
    train,
    train_in_float64,
    wait_for_step,
    write_config,
)

from geojax.checkpoint import RunDirectory
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.cli.main import run as geojax
from geojax.data import PrepareSettings, prepare
from geojax.inference import LoadedModel
from geojax.inference.loaded_model import serving_mesh
from geojax.saved_runs.saved_run import serve_run


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, corpus):
    """Twenty steps without interruption, checkpoints at 10 and 20."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(
        folder / "run.yaml",
        corpus,
        sample={"prompts": ["1 is"], "max_new_tokens": 10},
        trackers=[
            "tensorboard",
            {"module": "support.observers:Recording", "path": f"{folder}/calls"},
        ],
    )
    result = train(config)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "run", result


@pytest.fixture(scope="module")
def exact_losses_of_whole_run(tmp_path_factory, corpus):
    """The losses of the same steps on one device in float64."""
    folder = tmp_path_factory.mktemp("whole-float64")
    return losses(train_in_float64(folder, corpus, evaluation={}, checkpoint={}))


def test_a_run_leaves_everything_behind(whole_run):
    run, result = whole_run
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == list(range(1, 21))
    assert {line["compilations"] for line in trained} == {1}, "the step is compiled once"
    begun, *logged, ended = (run.parent / "calls").read_text().splitlines()
    assert begun.startswith("start run ")
    assert [int(line.split()[0]) for line in logged] == [line["step"] for line in lines]
    assert ended == "finish 0"
    validated = {line["step"]: line["validation/sums"] for line in lines if "loss" not in line}
    assert sorted(validated) == [0, 10, 20]
    assert validated[20] < validated[0] - 0.1
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "sample.txt").read_text().startswith("1 is")
    assert yaml.safe_load((run / "config.yaml").read_text())["mesh"]["dc"] == 2
    assert saved_steps(run) == [10, 20]
    assert "\ndc=2 x data=4 on 8 cpu devices\n" in result.stdout
    predicted = re.search(r"a step of a site: predicted (\S+ \S+) over dc", result.stdout)
    assert f"cross-site  predicted {predicted[1]} over dc" in re.sub(" {2,}", "  ", result.stdout)
    assert result.stderr == ""


def test_damaged_data_are_refused_in_a_line(tmp_path, corpus):
    shutil.copytree(corpus, tmp_path / "sums")
    shard = tmp_path / "sums" / "train-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    result = train(write_config(tmp_path / "run.yaml", tmp_path / "sums"))
    assert result.returncode == 2, result.stdout + result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert f"{shard}: its tokens are not those that manifest.json was made with" in error


def test_evaluate_and_generate_find_what_the_run_wrote(whole_run, tmp_path, capsys, monkeypatch):
    """While the lock of the run is held, and on another mesh; they write nothing there."""
    monkeypatch.setattr("geojax.runtime.enable_compilation_cache", lambda folder: None)
    run, _ = whole_run
    judged = tmp_path / "judged.json"
    mesh = ["--mesh.data", "2", "--mesh.tensor", "2"]
    with RunDirectory(run).lock():
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        evaluate = ["evaluate", str(run), "--sequences", "24", "--batch-size", "7", *mesh]
        assert geojax([*evaluate, "--output", str(judged)]) == 0
        assert capsys.readouterr().out.startswith("sums: loss ")
        assert geojax(["generate", str(run), "--prompt", "1 is", "--max-tokens", "10", *mesh]) == 0
        assert capsys.readouterr().out == (run / "sample.txt").read_text() + "\n"
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (logged,) = [line for line in lines if "loss" not in line and line["step"] == 20]
    results = json.loads(judged.read_text())
    assert results["step"] == 20
    assert results["texts"]["sums"]["loss"] == pytest.approx(logged["validation/sums"], rel=1e-6)


def test_a_checkpoint_that_its_run_removes_gives_way_to_the_next(whole_run, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(whole_run[0], run)
    load = LoadedModel.load

    def removed_meanwhile(saved, *arguments):
        monkeypatch.setattr(LoadedModel, "load", load)
        remove_checkpoint(run, saved.step)
        return load(saved, *arguments)

    monkeypatch.setattr(LoadedModel, "load", removed_meanwhile)
    lines = []
    served = serve_run(run, serving_mesh(1, 1, 1), log=lines.append)
    assert served.run.weights.step == 10
    assert lines[1] == "step 20 has been removed meanwhile"


def test_a_text_of_another_tokenizer_is_not_judged(whole_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("geojax.runtime.enable_compilation_cache", lambda folder: None)
    source = {"name": "other", "files": (str(tmp_path / "other.txt"),)}
    (tmp_path / "other.txt").write_text("quite another text " * 9)
    (other,) = prepare(PrepareSettings(output=tmp_path, sources=(source,), vocab_size=270))
    assert geojax(["evaluate", str(whole_run[0]), "--data", str(other.folder)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{other.folder}: was prepared with another tokenizer than the run's" in error


def test_hlo_text_of_an_unknown_form_is_a_note_and_the_run_trains_on(tmp_path, corpus):
    program = tmp_path / "later_xla.py"
    program.write_text(
        "import sys\n"
        "from geojax.cli.main import run\n"
        "from geojax.hlo import traffic\n"
        "traffic.program_text = lambda program: 'HloModule of a later version'\n"
        "sys.exit(run(['train', *sys.argv[1:]]))\n"
    )
    config = write_config(tmp_path / "run.yaml", corpus, steps=2)
    process = start(program, str(config))
    (output,) = finish(process)
    assert process.returncode == 0, output
    assert "note: the bytes over dc are predicted, not read" in output
    assert "this is not an HLO module" in output
    assert re.search(r"cross-site +predicted \S+ \S+ over dc, a step", output)
    assert set(losses(tmp_path / "run")) == {1, 2}


def test_a_finished_run_is_not_trained_again(whole_run, tmp_path, corpus):
    run, _ = whole_run
    shutil.copytree(run, tmp_path / "run")
    result = train(write_config(tmp_path / "run.yaml", corpus), "--resume")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing to train: the run is at step 20" in result.stdout
    assert losses(tmp_path / "run") == losses(run)


def test_a_killed_run_goes_on_with_the_same_bits(whole_run, tmp_path, corpus):
    run, _ = whole_run
    config = write_config(tmp_path / "run.yaml", corpus)
    process = start(config, "--checkpoint.interval", "5")
    wait_for_step(tmp_path / "run", 11, process)
    process.send_signal(signal.SIGKILL)
    finish(process)
    result = train(config, "--resume")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming from step" in result.stdout
    assert losses(tmp_path / "run") == losses(run)


def test_biases_of_routers_and_later_tokens_resume_with_the_same_bits(tmp_path, corpus):
    model = {
        **{"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 2, "head_dim": 12},
        **{"intermediate_size": 20, "vocab_size": 301, "max_position_embeddings": 32},
        **{"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        **{"scoring_func": "sigmoid", "use_router_bias": True, "num_nextn_predict_layers": 1},
    }
    config = write_config(
        tmp_path / "run.yaml",
        corpus,
        model=model,
        steps=4,
        simulate_devices=2,
        mesh={"data": 2},
        batch={"global_batch_size": 4, "sequence_length": 32},
        evaluation={"interval": 4, "sequences": 4},
        checkpoint={"interval": 2},
    )

    def results():
        lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        steps = [(line["loss"], line["mtp_loss"]) for line in lines if "loss" in line]
        saved = SavedModel.open(tmp_path / "run")
        names = ("layers.router.score_bias", "mtp.layers.router.score_bias")
        biases = [array for name in names for _, array in saved.blocks(name)]
        return steps, [bias.tolist() for bias in biases]

    assert train(config).returncode == 0
    steps, biases = results()
    assert len(steps) == 4
    assert all(np.any(bias) for bias in biases)
    remove_checkpoint(tmp_path / "run", 4)
    result = train(config, "--resume")
    assert "resuming from step 2" in result.stdout, result.stdout + result.stderr
    assert results() == (steps, biases)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 3}, {}),
        ({"dc": 3, "data": 2}, {}),
        (
            {"dc": 2, "data": 2, "tensor": 2},
            {"zero": {"stage": 3}, "parallelism": {"sequence": True}, "remat": "full"},
        ),
        (
            {"data": 2, "context": 2},
            {"zero": {"stage": 2}, "communication": {"overlap_grad_reduce": True}},
        ),
        (
            {"dc": 2, "data": 4},
            {
                "dc": {"role": "stage"},
                "pipeline": {"hop_ticks": 2},
                "batch": {"global_batch_size": 24, "sequence_length": 32, "microbatches": 3},
            },
        ),
    ],
    ids=["data3", "dc3-data2", "tensor2-zero3", "context2-zero2", "sites-as-stages"],
)
def test_a_checkpoint_resumes_on_another_layout(
    whole_run, exact_losses_of_whole_run, tmp_path, corpus, mesh, changes
):
    run, _ = whole_run
    shutil.copytree(run, tmp_path / "run")
    remove_checkpoint(tmp_path / "run", 20)
    devices = math.prod(mesh.values())
    settings = {"mesh": mesh, "simulate_devices": devices} | changes
    result = train(write_config(tmp_path / "run.yaml", corpus, **settings), "--resume")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "note:" not in result.stdout, "the same data comes in the same order"
    expected, actual = losses(run), losses(tmp_path / "run")
    assert sorted(actual) == sorted(expected)
    assert_as_near(actual, expected, exact_losses_of_whole_run)


def test_a_longer_run_of_another_batch_keeps_its_rates_and_skips_no_data(
    whole_run, tmp_path, corpus
):
    run, _ = whole_run
    shutil.copytree(run, tmp_path / "run")
    batch = {"global_batch_size": 48, "sequence_length": 32}
    result = train(write_config(tmp_path / "run.yaml", corpus, steps=22, batch=batch))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "changed since step 20: steps 20 -> 22\n" in result.stdout
    assert "changed since step 20: batch.global_batch_size 24 -> 48\n" in result.stdout
    assert "schedule, which ends at step 20; --optimizer.decay_steps 22 plans" in result.stdout
    assert "note:" not in result.stdout, "the data are the same"
    rates = [
        json.loads(line).get("learning_rate")
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    np.testing.assert_allclose([rate for rate in rates if rate][-3:], 3e-5, rtol=1e-6)
    manifests = list((tmp_path / "run" / "checkpoints").rglob("22/manifest.json"))
    assert manifests, "the run is saved at its end"
    for manifest in manifests:
        metadata = json.loads(manifest.read_text())["metadata"]
        assert metadata["consumed_sequences"] == 20 * 24 + 2 * 48


def test_ctrl_c_saves_and_the_run_goes_on_from_there(whole_run, tmp_path, corpus):
    run, _ = whole_run
    # Validating at every step leaves time for the signal to arrive in the middle of the run.
    config = write_config(
        tmp_path / "run.yaml", corpus, evaluation={"interval": 1, "sequences": 240}
    )
    process = start(config)
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGINT)
    (printed,) = finish(process)
    assert process.returncode == 130, printed
    stopped = max(losses(tmp_path / "run"))
    assert f"stopped at step {stopped}" in printed
    assert "Traceback" not in printed
    assert stopped in saved_steps(tmp_path / "run")
    assert train(config).returncode == 0
    assert losses(tmp_path / "run") == losses(run)


def test_ctrl_c_in_one_of_two_processes_that_share_each_layer_stops_both(tmp_path, corpus):
    config = write_config(
        tmp_path / "run.yaml",
        corpus,
        simulate_devices=1,
        mesh={"tensor": 2},
        steps=5000,
        evaluation={"interval": 5000, "sequences": 24},
        checkpoint={"interval": 5000},
    )
    processes = start_processes(config, sites=("east", "east"))
    wait_for_step(tmp_path / "run", 3, processes[0])
    processes[1].send_signal(signal.SIGINT)
    printed = finish(*processes)
    assert [process.returncode for process in processes] == [130, 130], "".join(printed)
    stopped = max(losses(tmp_path / "run"))
    assert f"stopped at step {stopped}" in printed[0]
    assert stopped in saved_steps(tmp_path / "run")


def test_a_checkpoint_is_made_when_the_last_one_is_old(tmp_path, corpus):
    checkpoint = {"interval": 1000, "interval_minutes": 1e-4, "keep": 5}
    result = train(write_config(tmp_path / "run.yaml", corpus, checkpoint=checkpoint))
    assert result.returncode == 0, result.stdout + result.stderr
    saved = saved_steps(tmp_path / "run")
    assert saved[-1] == 20
    assert len(saved) > 1


def test_a_run_that_diverges_stops_and_says_so(tmp_path, corpus):
    optimizer = {"peak_learning_rate": 1e6, "final_learning_rate": 0, "warmup_steps": 0}
    config = write_config(tmp_path / "run.yaml", corpus, optimizer=optimizer, skip_limit=3)
    result = train(config)
    assert result.returncode == 1, result.stdout + result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "not finite for 3 steps in a row" in result.stderr
    assert result.stdout.count("the step is skipped") == 3
