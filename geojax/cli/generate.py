"""`geojax generate RUN --prompt TEXT` or `--chat TEXT`: let a run's model write."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, TextIO

import tyro

from geojax.cli.serving import ServingOptions
from geojax.errors import UserError

if TYPE_CHECKING:
    from geojax.saved_runs.saved_run import SavedRun

_DEFAULT_TOKENS = 200
_LONGEST_LINE = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCommand(ServingOptions):
    """Continue texts, or answer questions, with the newest checkpoint of RUN, which may be running.

    One device holds the model, or as many as `--mesh.tensor`, `--mesh.expert` and `--mesh.data`
    say, whatever the run's mesh. The folders of all sites must lie in RUN. Texts go to stdout,
    notes to stderr.
    """

    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Beginning of a text; may be repeated. Default: each line of stdin is a prompt."""

    chat: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Message of a user, which the model answers by the chat template of the run's data; may be
    repeated. Only the answers are printed."""

    system: str | None = None
    """System message before each `--chat`."""

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
    from geojax.inference import Sampling, write_continuations

    sampling = Sampling(command.temperature, command.top_p)
    texts = _texts(command)
    serving = command.serve(lambda run: _request(command, run, texts))
    request = _request(command, serving.run, texts)
    continuations = write_continuations(
        serving.model,
        serving.run.tokenizer,
        request.prompts,
        stop_tokens=request.stop_tokens,
        max_new_tokens=request.tokens_to_add,
        sampling=sampling,
        seed=command.seed,
        batch_size=command.batch_size,
    )
    for text, continuation in zip(texts, continuations, strict=True):
        print(continuation if command.chat else text + continuation, end="\n\n", flush=True)
    return 0


def _texts(command: GenerateCommand) -> tuple[str, ...]:
    """Return the prompts, or the messages to answer.

    Raises:
        UserError: there is none, or there are both.
    """
    if command.chat and command.prompt:
        raise UserError(
            "geojax generate: --prompt and --chat are given; one of them would be right"
        )
    if command.system is not None and not command.chat:
        raise UserError("geojax generate: --system stands before a message; give --chat TEXT too")
    texts = command.chat or command.prompt or tuple(_lines(sys.stdin))
    if not texts:
        raise UserError(
            "geojax generate: no prompt is given; --prompt TEXT, --chat TEXT, or a line of stdin"
        )
    return texts


class _GenerationRequest(NamedTuple):
    """The tokens to continue, those that end a continuation, and most tokens to add to each."""

    prompts: Sequence[Sequence[int]]
    stop_tokens: Sequence[int]
    tokens_to_add: int


def _request(command: GenerateCommand, run: "SavedRun", texts: Sequence[str]) -> _GenerationRequest:
    """Return what the run's model is asked for.

    Raises:
        UserError: the run's model cannot do what is asked, or has no chat template.
    """
    from geojax.inference import check_request, encode_prompts, most_new_tokens

    model = run.model.base
    stops = {run.tokenizer.eos_id}
    prompts = []
    if command.chat:
        template = run.chat_template()
        for number, text in enumerate(texts):
            messages = [{"role": "user", "content": text}]
            if command.system is not None:
                messages.insert(0, {"role": "system", "content": command.system})
            try:
                prompts.append(template.prompt(messages, run.tokenizer))
            except ValueError as error:
                raise UserError(f"geojax generate: --chat {number}: {error}") from None
            stops |= template.ends_of_answer(messages, run.tokenizer)
    else:
        prompts = encode_prompts(model, run.tokenizer, texts)
    tokens_to_add = command.max_tokens
    if tokens_to_add is None:
        tokens_to_add = max(1, min(_DEFAULT_TOKENS, most_new_tokens(model, prompts)))
    check_request(model, prompts, tokens_to_add, command.seed)
    return _GenerationRequest(prompts, sorted(stops), tokens_to_add)


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
