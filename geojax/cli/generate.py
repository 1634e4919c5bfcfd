"""`geojax generate RUN --prompt TEXT`: let a run's model write."""

import dataclasses
import sys
from typing import Annotated

import tyro

from geojax.cli.serving import ServingOptions
from geojax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCommand(ServingOptions):
    """Continue texts with the newest checkpoint of RUN, which may be running.

    On one device, or on as many as `--mesh.tensor`, `--mesh.expert` and `--mesh.data` say, whatever
    mesh the run has. The folders of all sites must lie in RUN. Texts go to stdout, notes to stderr.
    """

    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Beginning of a text; may be repeated. Without it every line of stdin is one."""

    max_tokens: int = 200
    """Most tokens to add to each."""

    temperature: float = 0.7
    """Divisor of the logits; 0 picks the likeliest token."""

    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability."""

    seed: int = 0
    """Seed of the draws."""


def run(command: GenerateCommand) -> int:
    """Print each text with an empty line after it, and return the exit code 0."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    from geojax.inference import Sampling, write_texts

    sampling = Sampling(command.temperature, command.top_p)
    serving = command.serve()
    prompts = command.prompt or tuple(line.rstrip("\n") for line in sys.stdin)
    if not prompts:
        raise UserError("geojax generate: no prompt is given; --prompt TEXT, or a line of stdin")
    for text in write_texts(
        serving.model,
        serving.run.tokenizer,
        prompts,
        max_new_tokens=command.max_tokens,
        sampling=sampling,
        seed=command.seed,
        batch_size=command.batch_size,
    ):
        print(text, end="\n\n", flush=True)
    return 0
