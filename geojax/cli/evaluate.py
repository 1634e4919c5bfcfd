"""`geojax evaluate RUN`: the likelihood that a run's model gives to text."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from geojax.cli.serving import ServingOptions
from geojax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateCommand(ServingOptions):
    """Judge the newest checkpoint of RUN, which may be running.

    Without further options by the likelihood of what the run's data hold out.
    """

    data: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Folder of `geojax data prepare`, whose held-out text (or all, if it holds nothing out) is
    judged instead; may be repeated."""

    sequences: int | None = None
    """Most sequences of a text, evenly spaced; default: all."""

    output: Path | None = None
    """JSON file to write the results to."""


def run(command: EvaluateCommand) -> int:
    """Print the results and return the exit code 0."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    from geojax.train.held_out import held_out_texts, judge, prepared_text

    if command.sequences is not None and command.sequences < 1:
        raise UserError(f"--sequences is {command.sequences}; at least 1 would be right")
    serving = command.serve()
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
    results: dict[str, Any] = {"step": serving.run.weights.step, "texts": {}}
    for name, found in judged.items():
        print(
            f"{name}: loss {found.loss:.4f}, perplexity {found.perplexity:.4g}, "
            f"{found.targets:,} tokens"
        )
        results["texts"][name] = {**found._asdict(), "perplexity": found.perplexity}
    if command.output is not None:
        command.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0
