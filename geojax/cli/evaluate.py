"""`geojax evaluate RUN`: how well a run's model knows text, or does tasks."""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from geojax.cli.serving import ServingOptions
from geojax.errors import RunError, UserError

if TYPE_CHECKING:
    from geojax.inference.harness import Tasks
    from geojax.saved_runs.held_out import Text
    from geojax.saved_runs.saved_run import SavedRun, Serving


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateCommand(ServingOptions):
    """Evaluate the newest checkpoint of RUN, which may be running.

    The default is the loss and perplexity of the text that the run's data hold out. `--data` takes
    other text, and `--tasks` runs tasks of lm-eval.
    """

    data: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Folder of `geojax data prepare`, whose held-out text is read instead; may be repeated. A
    folder that holds nothing out is read whole."""

    sequences: int | None = None
    """Most sequences of a text, evenly spaced; default: all."""

    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval (the extra `evaluate`)."""

    task_folder: Path | None = None
    """Folder with YAML files of further tasks."""

    num_fewshot: int | None = None
    """Examples in each context; default: the task's own number."""

    limit: int | None = None
    """Most examples of a task; default: all."""

    output: Path | None = None
    """JSON file to write the results to."""


def run(command: EvaluateCommand) -> int:
    """Print the results and return the exit code 0."""
    _check(command)
    tasks = None
    if command.tasks:
        from geojax.inference.harness import Tasks

        tasks = Tasks.open(command.tasks, folder=command.task_folder, log=command.note)
    # JAX is imported from here on, so that `geojax --help` need not wait for it.
    texts: list[Text] = []
    judges_texts = bool(command.data) or tasks is None

    def check(run: "SavedRun") -> None:
        texts[:] = _open_texts(command, run) if judges_texts else []

    serving = command.serve(check)
    results: dict[str, Any] = {"step": serving.run.weights.step}
    if judges_texts:
        results["texts"] = _judge_texts(command, serving, texts)
    if tasks is not None:
        results["tasks"] = _run_tasks(command, serving, tasks)
    if command.output is not None:
        _write(command.output, json.dumps(results, indent=2) + "\n")
    return 0


def _check(command: EvaluateCommand) -> None:
    """Check the options before anything is read.

    Raises:
        UserError: one of them cannot be.
    """
    for option, least in (("sequences", 1), ("limit", 1), ("num_fewshot", 0)):
        number = getattr(command, option)
        if number is not None and number < least:
            name = option.replace("_", "-")
            raise UserError(f"--{name} is {number}; at least {least} would be right")
    for option in ("num_fewshot", "limit", "task_folder"):
        if getattr(command, option) is not None and not command.tasks:
            raise UserError(f"--{option.replace('_', '-')} requires --tasks; name some")
    if command.task_folder is not None and not command.task_folder.is_dir():
        raise UserError(
            f"--task-folder: {command.task_folder} is no folder; one with YAML files of tasks "
            "would be right"
        )
    if command.output is not None:
        _require_writable(command.output)
    if command.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "geojax evaluate: --tasks requires lm-eval; pip install 'geojax-trainer[evaluate]'"
        )


def _require_writable(path: Path) -> None:
    """Open the file that the results will be written to, and leave it as it is.

    Raises:
        UserError: it cannot be written.
    """
    is_new = not os.path.lexists(path)
    try:
        # A pipe that nobody reads is an error, and is not waited for.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666))
    except OSError as error:
        raise UserError(
            f"--output: {path} cannot be written ({error.strerror}); a file in an existing folder "
            "would be right"
        ) from None
    if is_new:
        path.unlink(missing_ok=True)


def _write(path: Path, results: str) -> None:
    """Write the results, or print them where that fails.

    Raises:
        RunError: they could not be written.
    """
    try:
        path.write_text(results, encoding="utf-8")
    except OSError as error:
        print(results, end="", flush=True)
        raise RunError(
            f"--output: {path} could not be written ({error.strerror}); the results are above"
        ) from None


def _open_texts(command: EvaluateCommand, run: "SavedRun") -> "list[Text]":
    from geojax.data.verification import verify
    from geojax.saved_runs.held_out import held_out_texts, prepared_text, require_tokenizer

    if command.data:
        texts = [prepared_text(folder) for folder in command.data]
    else:
        texts = held_out_texts(run)
    require_tokenizer(texts, run.tokenizer)
    verify([text.tokenized for text in texts], progress=True)
    return texts


def _judge_texts(
    command: EvaluateCommand, serving: "Serving", texts: "Sequence[Text]"
) -> dict[str, Any]:
    from geojax.saved_runs.held_out import judge

    judged = judge(
        serving,
        texts,
        batch_size=command.batch_size,
        most_sequences=command.sequences,
        log=command.note,
    )
    for name, found in judged.items():
        print(
            f"{name}: loss {found.loss:.4f}, perplexity {found.perplexity:.4g}, "
            f"{found.targets:,} tokens"
        )
    return {
        name: {**found._asdict(), "perplexity": found.perplexity} for name, found in judged.items()
    }


def _run_tasks(command: EvaluateCommand, serving: "Serving", tasks: "Tasks") -> dict[str, Any]:
    from lm_eval.utils import make_table

    from geojax.inference.harness import HarnessModel

    results = tasks.run(
        HarnessModel(serving.model, serving.run.tokenizer, batch_size=command.batch_size),
        num_fewshot=command.num_fewshot,
        limit=command.limit,
    )
    print(make_table(results))
    found: dict[str, Any] = results["results"]
    return found
