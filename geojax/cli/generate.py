"""`geojax generate RUN --prompt TEXT`: let a run's model write."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, TextIO

import tyro

from geojax.cli.serving import ServingOptions
from geojax.errors import UserError

if TYPE_CHECKING:
    from geojax.saved_runs.saved_run import SavedRun

_DEFAULT_TOKENS = 200
_LONGEST_LINE = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCommand(ServingOptions):
    """Continue texts with the newest checkpoint of RUN, which may be running.

    One device holds the model, or as many as `--mesh.tensor`, `--mesh.expert` and `--mesh.data`
    say, whatever the run's mesh. The folders of all sites must lie in RUN. Texts go to stdout,
    notes to stderr.
    """

    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Beginning of a text; may be repeated. Default: each line of stdin is a prompt."""

    max_tokens: int | None = None
    """Most tokens to add to each prompt. Default: 200, or fewer if the model has fewer
    positions."""

    temperature: float = 0.7
    """Divisor of the logits; 0 picks the likeliest token."""

    top_p: float = 1.0
    """Draw among the likeliest tokens whose probabilities sum to this."""

    seed: int = 0
    """Seed of the draws."""


def run(command: GenerateCommand) -> int:
    """Print each text with an empty line after it, and return the exit code 0."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    from geojax.inference import Sampling, write_texts

    sampling = Sampling(command.temperature, command.top_p)
    prompts = command.prompt or tuple(_lines(sys.stdin))
    if not prompts:
        raise UserError("geojax generate: no prompt is given; --prompt TEXT, or a line of stdin")
    serving = command.serve(lambda run: _tokens_to_add(command, run, prompts))
    for text in write_texts(
        serving.model,
        serving.run.tokenizer,
        prompts,
        max_new_tokens=_tokens_to_add(command, serving.run, prompts),
        sampling=sampling,
        seed=command.seed,
        batch_size=command.batch_size,
    ):
        print(text, end="\n\n", flush=True)
    return 0


def _tokens_to_add(command: GenerateCommand, run: "SavedRun", prompts: Sequence[str]) -> int:
    """Return the most tokens to add to each prompt.

    Raises:
        UserError: the run's model cannot do what is asked.
    """
    from geojax.inference import check_request, encode_prompts, most_new_tokens

    model = run.model.base
    tokens = encode_prompts(model, run.tokenizer, prompts)
    number = command.max_tokens
    if number is None:
        number = max(1, min(_DEFAULT_TOKENS, most_new_tokens(model, tokens)))
    check_request(model, tokens, number, command.seed)
    return number


def _lines(stream: TextIO) -> Iterator[str]:
    """Yield the lines of a stream.

    Raises:
        UserError: one is too long, or is no text.
    """
    try:
        while line := stream.readline(_LONGEST_LINE + 1):
            if len(line) > _LONGEST_LINE:
                raise UserError(f"stdin: a line of more than {_LONGEST_LINE:,} characters")
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin: not UTF-8 text (byte {error.object[error.start]:#04x})") from None
