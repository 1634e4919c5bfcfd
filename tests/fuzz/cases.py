"""Cases of the fuzz: what a user, a script or a damaged disk may hand to the `geojax` command.

Every case is drawn from a seed of its own, so that one can be run again: `python -m fuzz --only N`.
"""

import random

from fuzz.case import Case
from fuzz.corpus import Corpus
from fuzz.surfaces import (
    chats,
    commands,
    described_files,
    documents,
    environment,
    prepared,
    run_configs,
    saved_runs,
    weights,
)

SURFACES = (
    run_configs,
    commands,
    environment,
    described_files,
    documents,
    chats,
    prepared,
    weights,
    saved_runs,
)


class Cases:
    """Draws cases from what a corpus holds."""

    def __init__(self, corpus: Corpus, surface: str | None = None) -> None:
        """Draw from all surfaces, or from the one of a name."""
        self._corpus = corpus
        self._draws = [
            draw
            for module in SURFACES
            if surface is None or module.__name__.endswith(f".{surface}")
            for draw in module.DRAWS
        ]

    def draw(self, seed: int) -> Case:
        """Draw the case of `seed`."""
        rng = random.Random(seed)
        (draw,) = rng.choices([draw for _, draw in self._draws], [w for w, _ in self._draws])
        return draw(self._corpus, rng)
