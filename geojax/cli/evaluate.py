"""`geojax evaluate RUN`: how well a run's model knows text, or does tasks."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from geojax.cli.serving import ServingOptions
from geojax.errors import UserError

if TYPE_CHECKING:
    from geojax.train.saved.saved_run import Serving


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateCommand(ServingOptions):
    """Judge the newest checkpoint of RUN, which may be running.

    By the likelihood of what the run's data hold out, or of `--data`; or by `--tasks` of lm-eval.
    """

    data: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Folder of `geojax data prepare`, whose held-out text (or all, if it holds nothing out) is
    judged instead; may be repeated."""

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
    for name in ("sequences", "limit"):
        if (most := getattr(command, name)) is not None and most < 1:
            raise UserError(f"--{name} is {most}; at least 1 would be right")
    if command.output is not None and not command.output.parent.is_dir():
        raise UserError(f"--output: {command.output.parent} is no folder")
    if command.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "geojax evaluate: --tasks requires lm-eval; pip install 'geojax-trainer[evaluate]'"
        )
    # JAX is imported from here on, so that `geojax --help` need not wait for it.
    serving = command.serve()
    results: dict[str, Any] = {"step": serving.run.weights.step}
    if command.data or not command.tasks:
        results["texts"] = _judge_texts(command, serving)
    if command.tasks:
        results["tasks"] = _run_tasks(command, serving)
    if command.output is not None:
        command.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def _judge_texts(command: EvaluateCommand, serving: "Serving") -> dict[str, Any]:
    from geojax.train.saved.held_out import held_out_texts, judge, prepared_text

    if command.data:
        texts = [prepared_text(folder) for folder in command.data]
    else:
        texts = held_out_texts(serving.run)
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


def _run_tasks(command: EvaluateCommand, serving: "Serving") -> dict[str, Any]:
    from lm_eval.utils import make_table

    from geojax.inference.harness import HarnessModel, run_tasks

    results = run_tasks(
        HarnessModel(serving.model, serving.run.tokenizer, batch_size=command.batch_size),
        command.tasks,
        num_fewshot=command.num_fewshot,
        limit=command.limit,
        folder=command.task_folder,
    )
    print(make_table(results))
    found: dict[str, Any] = results["results"]
    return found
