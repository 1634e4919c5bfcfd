"""A step that one process has and all others of its runtime are told, and its file step.yaml.

process 0    reads step.yaml, if that was resolved from the same; or else resolves
all          get it through the key-value store, compressed: one message a process
"""

import base64
import binascii
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import pydantic

from geojax.config.run_config import RunConfig
from geojax.errors import MissingProcessesError, UserError
from geojax.runtime.key_value_store import await_published, publish
from geojax.settings import Settings
from geojax.step.resolved import MemoryVerdict, Origin, Step
from geojax.step.step_file import MOST_BYTES, read_step, write_step
from geojax.train.services import Log

_SHOWN = 5


class KeptStep(NamedTuple):
    """A step, and what became of the file that an earlier start has left."""

    step: Step
    is_new: bool = True
    """True if it is not in step.yaml yet."""
    replaces: str = ""
    """Names of what is not as it was for the step in the file."""


def agreed_step(resolve: Callable[[], Step], timeout_seconds: float, key: str = "step") -> Step:
    """Resolve a step on process 0, and return it on every process; all call it together.

    Args:
        resolve: makes the choices, on process 0 alone.
        timeout_seconds: time that process 0 has.
        key: name of the exchange, each time another.

    Raises:
        UserError: the step cannot be, on every process.
        MissingProcessesError: process 0 gives none.
    """
    if jax.process_index() == 0:
        try:
            step = resolve()
        except UserError as error:
            publish(key, step_or_error(error))
            raise
        publish(key, step_or_error(step))
        return step
    told = await_published(key, timeout_seconds)
    if told is None:
        raise MissingProcessesError("process 0 does not say what the step is", [0])
    return step_of_note(told, "process 0")


class _Note(Settings):
    """Text that tells a step, or why there is none."""

    step: str | None = None
    """Step as JSON, compressed."""
    error: str | None = None


def step_or_error(told: Step | UserError) -> str:
    """Return the text that tells a step, or the reason why there is none."""
    if isinstance(told, UserError):
        return _Note(error=str(told)).model_dump_json()
    packed = zlib.compress(told.model_dump_json().encode())
    return _Note(step=base64.b64encode(packed).decode()).model_dump_json()


def step_of_note(text: str, teller: str) -> Step:
    """Return the step in a text of `step_or_error`.

    Raises:
        UserError: the text tells why there is none, or is damaged.
    """
    try:
        note = _Note.model_validate_json(text)
        if note.error is not None:
            raise UserError(note.error)
        stream = zlib.decompressobj()
        content = stream.decompress(base64.b64decode(note.step or "", validate=True), MOST_BYTES)
        return Step.model_validate_json(content)
    except (pydantic.ValidationError, binascii.Error, zlib.error):
        raise UserError(
            f"{teller} tells a step that cannot be read; all processes need the same version of "
            "geojax"
        ) from None


def kept_or_resolved(path: Path, origin: Origin, resolve: Callable[[], Step]) -> KeptStep:
    """Return the step in the file at `path` if it was resolved from `origin`; else resolve.

    Args:
        path: step.yaml of a run directory, which need not be there.
        origin: the run as it is now.
        resolve: makes the choices.

    Raises:
        UserError: the file is damaged, or the layout cannot be.
    """
    kept = read_step(path)
    if kept is None:
        return KeptStep(resolve())
    differing = kept.origin.differences(origin)
    if not differing:
        return KeptStep(kept, is_new=False)
    return KeptStep(resolve(), replaces=named_differences(differing))


def named_differences(differing: Sequence[str]) -> str:
    """Name the first of what differs, and the number of the rest."""
    named = ", ".join(differing[:_SHOWN])
    more = len(differing) - _SHOWN
    return f"{named} and {more} more" if more > 0 else named


def show_memory(config: RunConfig, verdict: MemoryVerdict, log: Log) -> None:
    """Log the comparison of a step's memory with its devices'.

    Raises:
        UserError: it does not fit, and `config.preflight` says to refuse it.
    """
    if verdict.kind == "fits":
        log(f"memory: {verdict.line}")
    elif verdict.kind == "may not fit":
        log(f"warning: memory: {verdict.line}")
    elif verdict.kind == "does not fit":
        if config.preflight == "refuse":
            raise UserError(f"preflight: {verdict.line}; --preflight warn would start it anyway")
        log(f"warning: preflight: {verdict.line}")


def keep(kept: KeptStep | None, path: Path, log: Log) -> None:
    """Write a new step to `path`, beside the one that stood there."""
    if kept is None or not kept.is_new:
        return
    earlier = write_step(kept.step, path)
    if earlier is not None:
        log(f"{path}: resolved anew, for other {kept.replaces}; the earlier one is {earlier.name}")
