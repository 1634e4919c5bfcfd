"""The step of a run, which process 0 resolves for all and keeps as step.yaml.

process 0    reads step.yaml, if that was resolved from the same; or else resolves
all          get it through the key-value store, compressed: one message a process
a site       with its own runtime resolves for itself; the sites compare digests as they meet
"""

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from geojax.config.run_config import RunConfig
from geojax.errors import MissingProcessesError, UserError
from geojax.runtime.key_value_store import await_published, publish
from geojax.settings import validate
from geojax.step.resolved import MemoryVerdict, Origin, Step
from geojax.step.step_file import origin_of, read_step, write_step
from geojax.topology import Topology
from geojax.train.services import Log, Services

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
            publish(key, json.dumps({"error": str(error)}))
            raise
        publish(key, json.dumps({"step": _packed(step)}))
        return step
    told = await_published(key, timeout_seconds)
    if told is None:
        raise MissingProcessesError("process 0 does not say what the step is", [0])
    content = json.loads(told)
    if "error" in content:
        raise UserError(content["error"])
    return _unpacked(content["step"])


def _packed(step: Step) -> str:
    return base64.b64encode(zlib.compress(step.model_dump_json().encode())).decode()


def _unpacked(text: str) -> Step:
    content = json.loads(zlib.decompress(base64.b64decode(text)))
    return validate(Step, content, "the step of process 0")


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
    named = ", ".join(differing[:_SHOWN])
    if more := len(differing) - _SHOWN:
        named += f" and {more} more" if more > 0 else ""
    return KeptStep(resolve(), replaces=named)


def step_of_run(
    config: RunConfig,
    topology: Topology | None,
    path: Path,
    services: Services,
    log: Log,
) -> tuple[Step, KeptStep | None]:
    """Agree on the step of a run, and compare its memory with its devices'.

    Args:
        config: the run.
        topology: its sites.
        path: step.yaml of its directory, or of that of its site.
        services: resolves the step.
        log: shows a line to the user.

    Returns:
        The step, and on process 0 what becomes of the file, for `keep`.

    Raises:
        UserError: the layout cannot be, or does not fit and `config.preflight` says to refuse it.
        MissingProcessesError: process 0 gives no step.
    """
    kept = None

    def resolve() -> Step:
        nonlocal kept
        devices = jax.devices()
        kept = kept_or_resolved(
            path,
            origin_of(config, topology, devices),
            lambda: services.resolve(config, topology, devices, log),
        )
        return kept.step

    step = agreed_step(resolve, config.watchdog.first_step_seconds)
    show_memory(config, step.memory, log)
    return step, kept


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
