"""Texts that a model writes, in batches of prompts.

Shapes: B prompts, P slots of the prompts (`geojax.inference.decoder`), T new tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from geojax.collectives.axes import varying_axes
from geojax.data import Tokenizer
from geojax.errors import RunError, UserError
from geojax.inference.decoder import Cache, decode, prefill
from geojax.inference.loaded_model import (
    SEQUENCES,
    LoadedModel,
    parallelism_of,
    sharded_program,
)
from geojax.inference.sampling import Sampling
from geojax.models import AnyModel, Parameters

_SLOT_MULTIPLE = 32
"""Prompts are padded to a multiple of this many slots, so that batches share a program."""

_BEGINNING_CHARACTERS = 1 << 16
"""Characters of a prompt that are encoded first, to learn whether it is far too long."""

_NO_PROMPT = -1
"""The number of a row that only fills a batch up."""


class _Prompts(NamedTuple):
    """A batch of prompts, padded on the left."""

    tokens: Any
    """int32 [B, P]."""
    padding: Any
    """int32 [B], slots before each prompt."""
    number: Any
    """int32 [B], number of the prompt among all, or `_NO_PROMPT`."""


def write_texts(
    model: LoadedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    batch_size: int = 16,
) -> Iterator[str]:
    """Yield each prompt with its continuation, up to the end of the document.

    Arguments and errors are those of `generate`; each prompt begins a document.
    """
    continued = write_continuations(
        model,
        tokenizer,
        encode_prompts(model.config, tokenizer, prompts),
        stop_tokens=(tokenizer.eos_id,),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        batch_size=batch_size,
    )
    for prompt, text in zip(prompts, continued, strict=True):
        yield prompt + text


def write_continuations(
    model: LoadedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    stop_tokens: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    batch_size: int = 16,
) -> Iterator[str]:
    """Yield the text that continues each of the prompts, which are tokens.

    Arguments and errors are those of `generate`.
    """
    continued = generate(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=stop_tokens,
        batch_size=batch_size,
    )
    for prompt, tokens in zip(prompts, continued, strict=True):
        yield tokenizer.decode_behind(prompt, tokens)


def encode_prompts(
    config: AnyModel, tokenizer: Tokenizer, prompts: Sequence[str]
) -> list[list[int]]:
    """Return the tokens of prompts, each of which begins a document.

    Of a prompt that is far too long only a beginning is encoded.

    Raises:
        UserError: a prompt takes more than the model's positions.
    """
    return [_encode_prompt(config, tokenizer, *numbered) for numbered in enumerate(prompts)]


def _encode_prompt(config: AnyModel, tokenizer: Tokenizer, number: int, prompt: str) -> list[int]:
    positions = config.max_position_embeddings
    characters = _BEGINNING_CHARACTERS
    while True:
        beginning = prompt[:characters]
        tokens = [tokenizer.bos_id, *tokenizer.encode(beginning)]
        is_all = len(beginning) == len(prompt)
        # The word that a beginning cuts may have fewer tokens in the whole.
        cut = "" if is_all else beginning[beginning.rfind(" ") + 1 :]
        if len(tokens) - len(cut.encode()) > positions:
            raise UserError(
                f"generate: prompt {number} of {len(prompt):,} characters takes "
                f"{'' if is_all else 'more than '}{len(tokens):,} positions, and the model has "
                f"{positions:,} (max_position_embeddings); a shorter one would be right"
            )
        if is_all:
            return tokens
        characters *= 4


def most_new_tokens(config: AnyModel, prompts: Sequence[Sequence[int]]) -> int:
    """Return the tokens that the model's positions leave room for after the longest prompt."""
    # The last token drawn is not read again.
    return config.max_position_embeddings - max(map(len, prompts), default=0) + 1


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    batch_size: int = 16,
) -> list[list[int]]:
    """Generate at most `max_new_tokens` tokens after each prompt.

    The tokens are the same on every mesh and for every `batch_size`, but for rounding.

    Args:
        model: the model.
        prompts: token numbers, at least one each; lengths may differ.
        max_new_tokens: tokens to add to each.
        sampling: how a token is chosen.
        seed: seed of the draws.
        stop_tokens: tokens that end a text; they are not returned.
        batch_size: prompts that are continued together.

    Raises:
        UserError: an argument is out of range, or a text would take more than the model's
            positions.
        RunError: the memory of the devices is too small.
    """
    check_request(model.config, prompts, max_new_tokens, seed)
    stops = tuple(sorted({*stop_tokens}))
    program = _program(model.config, model.mesh, sampling, max_new_tokens, stops)
    continued: list[list[int]] = [[] for _ in prompts]
    for numbers in _batches(prompts, batch_size):
        batch = _pad(prompts, numbers, model)
        try:
            written = np.asarray(program(model.parameters, batch, np.uint32(seed))).tolist()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise RunError(
                f"generate: {len(numbers)} texts of up to {batch.tokens.shape[1] + max_new_tokens} "
                "positions need more memory than the devices have; generate fewer tokens, or set a "
                "smaller batch size"
            ) from None
        for number, tokens in zip(numbers, written, strict=False):
            ends = (place for place, token in enumerate(tokens) if token in stops)
            continued[number] = tokens[: next(ends, len(tokens))]
    return continued


def check_request(
    config: AnyModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int
) -> None:
    """Raise a UserError if the model cannot be asked for that: see `generate`."""
    if any(len(prompt) == 0 for prompt in prompts):
        raise UserError("generate: a prompt is empty; at least one token would be right")
    beyond = [token for prompt in prompts for token in prompt if not 0 <= token < config.vocab_size]
    if beyond:
        raise UserError(
            f"generate: token {beyond[0]} in a prompt is outside the model's vocabulary "
            f"(0 to {config.vocab_size - 1})"
        )
    if max_new_tokens < 1:
        raise UserError(f"generate: max_new_tokens is {max_new_tokens}; at least 1 would be right")
    if not 0 <= seed < 2**32:
        raise UserError(f"generate: seed is {seed}; 0 to {2**32 - 1} would be right")
    room = most_new_tokens(config, prompts)
    if max_new_tokens > room:
        raise UserError(
            f"generate: prompt and continuation take "
            f"{config.max_position_embeddings + max_new_tokens - room:,} positions, the model has "
            f"{config.max_position_embeddings:,} (max_position_embeddings); at most {room} new "
            "tokens would be right"
        )


def _batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Yield the numbers of the prompts of each batch, the longest first."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for first in range(0, len(order), size):
        yield order[first : first + size]


def _pad(prompts: Sequence[Sequence[int]], numbers: list[int], model: LoadedModel) -> _Prompts:
    longest = max(len(prompts[number]) for number in numbers)
    rounded = -(-longest // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
    width = min(rounded, model.config.max_position_embeddings)
    rows = -(-len(numbers) // model.ranks) * model.ranks
    tokens = np.zeros((rows, width), np.int32)
    padding = np.zeros(rows, np.int32)
    for row, number in enumerate(numbers):
        padding[row] = width - len(prompts[number])
        tokens[row, padding[row] :] = prompts[number]
    filler = [_NO_PROMPT] * (rows - len(numbers))
    return _Prompts(tokens, padding, np.array([*numbers, *filler], np.int32))


class _DecodingState(NamedTuple):
    """The state between two tokens."""

    drawn: jax.Array
    """int32 [], tokens drawn so far of each text."""
    tokens: jax.Array
    """The last one of each, int32 [B]."""
    finished: jax.Array
    """Texts that have ended, bool [B]."""
    unfinished_anywhere: jax.Array
    """Texts of all ranks that have not."""
    cache: Cache | jax.Array
    written: jax.Array
    """int32 [B, T]."""


@functools.cache
def _program(
    config: AnyModel,
    mesh: Mesh,
    sampling: Sampling,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
) -> Any:
    """Jit the continuation `(weights, prompts, seed) -> int32 [B, T]`.

    What follows a text's stop token is arbitrary.
    """
    parallelism = parallelism_of(mesh)

    def continue_prompts(parameters: Parameters, prompts: _Prompts, seed: jax.Array) -> jax.Array:
        width = prompts.tokens.shape[1]
        key = jax.random.key(seed)

        def draw(logits: jax.Array, slot: jax.Array | int) -> jax.Array:
            """Draw what comes into `slot`, by the prompt's number and the token's position."""
            of_text = jax.vmap(functools.partial(jax.random.fold_in, key))(prompts.number)
            return sampling.draw(
                logits, jax.vmap(jax.random.fold_in)(of_text, slot - prompts.padding)
            )

        def is_end(tokens: jax.Array) -> jax.Array:
            ends = [tokens == stop for stop in stop_tokens]
            return functools.reduce(jnp.logical_or, ends, jnp.zeros_like(tokens, bool))

        def unfinished(finished: jax.Array) -> jax.Array:
            return lax.psum((~finished).sum(), tuple(sorted(varying_axes(finished))))

        def goes_on(loop: _DecodingState) -> jax.Array:
            return (loop.drawn < max_new_tokens) & (loop.unfinished_anywhere > 0)

        def next_token(loop: _DecodingState) -> _DecodingState:
            slot = width + loop.drawn - 1
            decoded = decode(
                parameters,
                loop.tokens,
                slot,
                prompts.padding,
                loop.cache,
                config,
                parallelism=parallelism,
            )
            tokens = draw(decoded.logits, slot + 1)
            finished = loop.finished | is_end(tokens)
            return _DecodingState(
                drawn=loop.drawn + 1,
                tokens=tokens,
                finished=finished,
                unfinished_anywhere=unfinished(finished),
                cache=decoded.cache,
                written=lax.dynamic_update_slice_in_dim(
                    loop.written, tokens[:, None], loop.drawn, axis=1
                ),
            )

        begun = prefill(
            parameters,
            prompts.tokens,
            prompts.padding,
            config,
            slots=width + max_new_tokens,
            parallelism=parallelism,
        )
        tokens = draw(begun.logits, width)
        finished = is_end(tokens) | (prompts.number == _NO_PROMPT)
        loop = _DecodingState(
            drawn=jnp.int32(1),
            tokens=tokens,
            finished=finished,
            unfinished_anywhere=unfinished(finished),
            cache=begun.cache,
            written=jnp.repeat(tokens[:, None], max_new_tokens, axis=1),
        )
        return lax.while_loop(goes_on, next_token, loop).written

    arguments = (_Prompts(SEQUENCES, SEQUENCES, SEQUENCES), PartitionSpec())
    return sharded_program(config, mesh, continue_prompts, arguments, SEQUENCES)
