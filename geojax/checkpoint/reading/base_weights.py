"""The identity of a run's frozen weights, which are in none of its checkpoints."""

from pathlib import Path

import jax

from geojax.checkpoint.agreement import first_text
from geojax.checkpoint.reading.initial_weights import InitialWeights
from geojax.errors import UserError

BASE_WEIGHTS = "base_weights"
"""Key of the `fingerprint` in a checkpoint's metadata."""


def fingerprint(weights: InitialWeights) -> str:
    """Return `InitialWeights.digest`, which the first process reads, on every process.

    Raises:
        UserError: a file is missing or damaged.
    """
    digest, problem = None, None
    if jax.process_index() == 0:
        try:
            digest = weights.digest()
        except UserError as error:
            problem = str(error)
    if problem := first_text(problem):
        raise UserError(problem)
    found = first_text(digest)
    assert found is not None, "the first process has read the weights"
    return found


def refuse_other_base(folder: Path, saved: str, found: str) -> None:
    """Compare the `fingerprint` of a checkpoint's frozen weights with that of those in `folder`.

    Raises:
        UserError: they differ.
    """
    if saved != found:
        raise UserError(
            f"{folder}: holds other weights than those that the run adapts; initial_weights must "
            "be the folder of those"
        )
