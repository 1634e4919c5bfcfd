"""Tasks of EleutherAI's evaluation harness (lm-eval), answered by a loaded model.

The model answers like lm-eval's own `hf` backend for the exported model. Texts are encoded as the
`tokenizer.json` says, and a text without a context follows the beginning token.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from geojax.data import Tokenizer
from geojax.errors import RunError, UserError
from geojax.inference.generation import generate
from geojax.inference.likelihood import score
from geojax.inference.loaded_model import LoadedModel
from geojax.inference.sampling import Sampling
from geojax.job.exit_messages import first_line

_POSITION_MULTIPLE = 64
"""Sequences are padded to a multiple of this many positions, so that batches share a program."""
_OF_NETWORK = re.compile("Connect|Timeout|Offline|LocalEntryNotFound|HfHubHTTP|MaxRetry|SSL")
_MOST_CHARACTERS = 160
_SAMPLING_KEYS = {"do_sample", "temperature", "top_p"}


class _Request(NamedTuple):
    """Tokens to read, the last `judged` of which are judged."""

    tokens: list[int]
    judged: int


class HarnessModel(TemplateLM):
    """A loaded model, as the harness asks it."""

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, *, batch_size: int) -> None:
        """Take a model and the tokenizer of its texts.

        Args:
            model: the model.
            tokenizer: the tokenizer.
            batch_size: sequences that are computed together.
        """
        super().__init__()
        self._model, self._words = model, tokenizer
        self._rows = math.ceil(batch_size / model.ranks) * model.ranks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._words.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without a context is read after."""
        return self._words.bos_id

    @property
    def max_length(self) -> int:
        """The longest sequence."""
        return self._model.config.max_position_embeddings

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text."""
        return self._words.encode(string, special_tokens=add_special_tokens is not False)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of `max_length`."""
        windows: list[tuple[None, list[int], list[int]]] = []
        ends = []
        for request in requests:
            (text,) = request.args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(pair)) for pair in rolling]
            ends.append(len(windows))
        found = [value for value, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        starts = [0, *ends[:-1]]
        return [sum(found[start:end]) for start, end in zip(starts, ends, strict=True)]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to the first of its stop sequences."""
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        for numbers in alike.values():
            options = normalize_gen_kwargs(requests[numbers[0]].args[1])
            longest = options.pop("max_gen_toks")
            stops = handle_stop_sequences(options.pop("until"), eos=self._words.end)
            if longest >= self.max_length:
                raise UserError(
                    f"geojax evaluate: a task asks for {longest} tokens, and the model has "
                    f"{self.max_length} positions"
                )
            room = self.max_length - longest
            written = generate(
                self._model,
                [self.tok_encode(requests[number].args[0])[-room:] for number in numbers],
                max_new_tokens=longest,
                sampling=_sampling(options),
                stop_tokens=(self.eot_token_id,),
                batch_size=self._rows,
            )
            for number, tokens in zip(numbers, written, strict=True):
                text = self._words.decode(tokens)
                texts[number] = postprocess_generated_text(text, stops, None)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Judge continuations: (key, context, continuation) to log-likelihood and greediness."""
        asked = [
            _Request(
                (context + wanted)[-(self.max_length + 1) :], min(len(wanted), self.max_length)
            )
            for _, context, wanted in requests
        ]
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(asked)
        with tqdm(total=len(asked), disable=disable_tqdm, desc="log-likelihoods") as progress:
            for numbers in self._batches(asked):
                found = score(self._model, self._pad([asked[number] for number in numbers]))
                for row, number in enumerate(numbers):
                    end = len(asked[number].tokens) - 1
                    targets = slice(end - asked[number].judged, end)
                    answers[number] = (
                        float(found.log_likelihood[row, targets].sum(dtype=np.float64)),
                        bool(found.is_likeliest[row, targets].all()),
                    )
                progress.update(len(numbers))
        return answers

    def _batches(self, requests: Sequence[_Request]) -> Iterator[list[int]]:
        """Yield the numbers of the requests of each batch, the longest first."""
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
        for first in range(0, len(order), self._rows):
            yield order[first : first + self._rows]

    def _pad(self, requests: Sequence[_Request]) -> dict[str, np.ndarray]:
        """Make a batch of requests, padded on the right and with rows of padding."""
        longest = max(len(request.tokens) for request in requests) - 1
        rounded = math.ceil(longest / _POSITION_MULTIPLE) * _POSITION_MULTIPLE
        width = min(rounded, self.max_length)
        tokens = np.zeros((self._rows, width + 1), np.int32)
        real = np.zeros((self._rows, width), np.int32)
        for row, request in enumerate(requests):
            tokens[row, : len(request.tokens)] = request.tokens
            real[row, : len(request.tokens) - 1] = 1
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "segment_ids": real,
            "positions": np.arange(width, dtype=np.int32) * real,
            "row": np.arange(self._rows, dtype=np.int32),
        }


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Tasks of lm-eval, whose data have been read."""

    names: tuple[str, ...]
    manager: TaskManager

    @classmethod
    def open(
        cls, names: Sequence[str], *, folder: Path | None, log: Callable[[str], None] = print
    ) -> "Tasks":
        """Find tasks and read their data, which may come from the Hugging Face hub.

        Args:
            names: names of tasks or groups.
            folder: folder with YAML files of further tasks.
            log: shows a line to the user.

        Raises:
            UserError: a task is unknown, or its description is wrong.
            RunError: its data cannot be reached.
        """
        log("reading lm-eval's tasks and their data")
        try:
            manager = TaskManager(include_path=folder and str(folder))
        except Exception as error:  # a YAML file may be wrong in any way
            raise UserError(f"--task-folder: {folder}: {_reason(error)}") from None
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            raise UserError(
                f"geojax evaluate: lm-eval knows no task '{unknown[0]}'; its own are listed by "
                "lm-eval ls tasks, and those of --task-folder are used too"
            )
        try:
            loaded = manager.load(list(names))
        except Exception as error:  # tasks are programs, and libraries below them read the data
            where = f"geojax evaluate: the data of {', '.join(names)}"
            if _is_unreachable(error):
                raise RunError(
                    f"{where} cannot be reached ({_reason(error)}). Run the task once on a "
                    "machine with internet and bring its HF_HOME, or use --task-folder with tasks "
                    "over local files"
                ) from None
            raise UserError(
                f"{where} cannot be read ({_reason(error)}); correct the task's YAML file"
            ) from None
        vars(manager)["load"] = lambda task_list: loaded  # it is asked for them once more
        return cls(tuple(names), manager)

    def run(
        self, model: HarnessModel, *, num_fewshot: int | None = None, limit: int | None = None
    ) -> dict[str, Any]:
        """Return lm-eval's results.

        Args:
            model: the model.
            num_fewshot: examples in each context; None: the task's own number.
            limit: examples of each task that are judged; None: all.
        """
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=model,
            tasks=list(self.names),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=self.manager,
            log_samples=False,
        )
        return results


def _is_unreachable(error: BaseException) -> bool:
    """Return True for an error that a network, and not a task, is the cause of."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    # The libraries' own errors; none of them is imported here.
    return any(
        isinstance(each, ConnectionError | TimeoutError)
        or _OF_NETWORK.search(type(each).__name__) is not None
        for each in causes
    )


def _reason(error: BaseException) -> str:
    return first_line(error)[:_MOST_CHARACTERS]


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """Return the sampling of a task's generation options.

    Raises:
        UserError: one of them is not carried.
    """
    if unknown := options.keys() - _SAMPLING_KEYS:
        raise UserError(
            f"geojax evaluate: a task asks for the generation option '{min(unknown)}'; "
            f"{', '.join(sorted(_SAMPLING_KEYS))} are carried"
        )
    temperature = options.get("temperature", 1.0) if options["do_sample"] else 0.0
    return Sampling(temperature, options.get("top_p", 1.0))
