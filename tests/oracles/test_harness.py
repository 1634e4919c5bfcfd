"""Tasks of lm-eval over local files: geojax's backend against lm-eval's own of the export."""

import functools
import json

import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from support.small_runs import prepare_corpus, train, write_config

from geojax.cli.main import run as geojax
from geojax.errors import RunError, UserError
from geojax.inference.harness import HarnessModel, Tasks
from geojax.inference.loaded_model import serving_mesh
from geojax.saved_runs.saved_run import serve_run

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{greedy}}",
        "generation_kwargs": {"until": ["1", "e"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}
DOCUMENTS = [
    {
        "question": f"{word} is {word * 3 % 17} {word + 1} is",
        "choices": [f" {(word + 1) * factor % 17}" for factor in (2, 3, 5)],
        "answer": word % 3,
        "greedy": " 3",
        "text": " ".join(f"{place} is {place * word % 17}" for place in range(word % 11)),
    }
    for word in range(3, 15)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of a run, of its export, and of the tasks."""
    folder = tmp_path_factory.mktemp("evaluation")
    config = write_config(
        folder / "run.yaml",
        prepare_corpus(folder),
        simulate_devices=4,
        mesh={"dc": 2, "data": 2},
        dc={"role": "stage"},
        model={
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 52,
            "vocab_size": 301,
            "max_position_embeddings": 32,
            "initializer_range": 0.3,  # its texts are not all alike
        },
        batch={"global_batch_size": 24, "sequence_length": 32, "microbatches": 4},
        steps=2,
    )
    done = train(config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert geojax(["export", str(folder / "run"), "--output", str(folder / "export")]) == 0
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": files}
        content = common | {"test_split": "test", "num_fewshot": 0} | task
        (tasks / f"{name}.yaml").write_text(json.dumps(content))
    return folder


def evaluate(model, folder):
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    return simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, log_samples=True, bootstrap_iters=0
    )


def answers(results):
    """Each document's responses: numbers of log-likelihoods, and texts."""
    return {
        task: [sample["filtered_resps"] for sample in sorted(samples, key=lambda s: s["doc_id"])]
        for task, samples in results["samples"].items()
    }


def flat(responses):
    """The numbers of responses (log-likelihood, is greedy) or log-likelihood."""
    return [float(value) for each in responses for value in np.ravel(each)]


def test_metrics_and_likelihoods_are_those_of_the_hf_backend(folder):
    theirs = evaluate(
        HFLM(str(folder / "export"), device="cpu", dtype="float32", batch_size=5), folder
    )
    served = serve_run(folder / "run", serving_mesh(1, 1, 2), dtype="float32")
    ours = evaluate(HarnessModel(served.model, served.run.tokenizer, batch_size=5), folder)
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            found = ours["results"][task][name]
            expected = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert found == expected, (task, name)
    expected, found = answers(theirs), answers(ours)
    assert found["answers"] == expected["answers"]
    assert len({text for (text,) in found["answers"]}) > 1
    for task in ("choices", "texts"):
        for mine, other in zip(found[task], expected[task], strict=True):
            assert flat(mine) == pytest.approx(flat(other), rel=1e-5)


def test_the_command_prints_and_writes_the_results(folder, capsys, monkeypatch):
    monkeypatch.setattr("geojax.runtime.enable_compilation_cache", lambda folder: None)
    # Reading lm-eval's own ten thousand tasks takes most of a minute.
    alone = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("geojax.inference.harness.TaskManager", alone)
    run, tasks, output = (folder / name for name in ("run", "tasks", "results.json"))
    arguments = ["evaluate", str(run), "--task-folder", str(tasks), "--output", str(output)]
    assert geojax([*arguments, "--tasks", "choices", "texts", "--limit", "3"]) == 0
    assert "acc_norm" in capsys.readouterr().out
    results = json.loads(output.read_text())
    assert set(results["tasks"]) == {"choices", "texts"}
    assert geojax([*arguments, "--tasks", "none of them"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: geojax evaluate: lm-eval knows no task 'none of them'")


@pytest.mark.parametrize(
    ("dataset", "kind", "message"),
    [
        ({"dataset_path": "Rowan/hellaswag"}, RunError, "cannot be reached .*bring its HF_HOME"),
        (
            {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "/nowhere.json"}}},
            UserError,
            "cannot be read .*; correct the task's YAML file",
        ),
    ],
)
def test_tasks_whose_data_are_not_there_end_in_a_line(
    dataset, kind, message, tmp_path, monkeypatch
):
    """The hub is not asked: the tests' environment is offline."""
    alone = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("geojax.inference.harness.TaskManager", alone)
    task = {"task": "mine", "test_split": "test", **TASKS["texts"], **dataset}
    (tmp_path / "mine.yaml").write_text(json.dumps(task))
    with pytest.raises(kind, match=message) as error:
        Tasks.open(["mine"], folder=tmp_path)
    assert type(error.value) is kind
