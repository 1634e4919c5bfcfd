"""Blend of several texts in the order of Megatron-LM (core 0.16.1, `BlendedDataset`).

Sample n comes from the text whose share w of n samples exceeds most what it has given: the largest
w * n - given, in float64; of equal ones the first.
"""

import math
from collections.abc import Sequence

import numpy as np

from geojax.data.corpus import Source
from geojax.data.megatron.megatron_text import MegatronText
from geojax.data.megatron.sample_order import SampleOrder
from geojax.data.packing import Window
from geojax.data.windows import SequenceOrigin
from geojax.errors import UserError

_SURPLUS = 0.005
"""Share of samples that each text of a blend has in addition to those that it should give."""
_STEPS, _LANES, _WARM_UP = 1 << 12, 1 << 12, 1 << 8


class MegatronBlend:
    """Samples of several texts.

    Memory: 1 byte for each sample, beside the memory of the texts' orders.
    """

    def __init__(self, orders: Sequence[SampleOrder], choices: "Choices") -> None:
        self.orders, self.choices = orders, choices

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.choices.texts)

    def origin(self, number: int) -> SequenceOrigin:
        """Return the origin of a sequence."""
        return SequenceOrigin(number, self.orders[int(self.choices.texts[number])].name, None)

    def __getitem__(self, index: int) -> Window:
        """Read a sample.

        Raises:
            UserError: a value is no token.
        """
        text = int(self.choices.texts[index])
        return self.orders[text][self.choices.number_within(index)]


def megatron_blend(
    sources: Sequence[Source], *, sequence_length: int, total_sequences: int, seed: int
) -> SampleOrder | MegatronBlend:
    """Return the samples of a run in the order of Megatron-LM.

    Without weights, several texts are read once each. With them, each gets as many epochs as its
    share of the run needs.

    Args:
        sources: the texts to train on.
        sequence_length: tokens of a sample.
        total_sequences: samples that the run takes.
        seed: seed of the shuffles.

    Raises:
        UserError: a text has too few tokens, or Megatron-LM would refuse the blend.
    """
    weights = [source.given_weight for source in sources if source.given_weight is not None]
    if len(sources) == 1 and not weights:
        return _order(sources[0], sequence_length, total_sequences, seed)
    if not weights:
        orders = [_order(source, sequence_length, None, seed) for source in sources]
        shares = _shares([len(order) for order in orders])
        size = sum(map(len, orders))
        if size < total_sequences:
            raise UserError(
                f"data.order: megatron reads sources without weights once, which makes {size:,} "
                f"sequences, and the run takes {total_sequences:,}; give every source a weight, or "
                "train for fewer steps"
            )
        size = total_sequences
    else:
        shares = _shares(weights)
        targets = [math.ceil(total_sequences * share) for share in shares]
        orders = [
            _order(source, sequence_length, math.ceil(target * (1 + _SURPLUS)), seed)
            for source, target in zip(sources, targets, strict=True)
        ]
        size = sum(targets)
        shares = _shares(shares)  # which may change the last bit
    choices = Choices(np.asarray(shares), size)
    for source, order, taken in zip(sources, orders, choices.totals.tolist(), strict=True):
        if taken > len(order):
            raise UserError(
                f"source '{source.name}': the blend of Megatron-LM takes {taken:,} of its samples "
                f"and makes {len(order):,}, which Megatron-LM refuses as well; another number of "
                "steps, or other weights, would do"
            )
    return MegatronBlend(orders, choices)


class Choices:
    """The text of each sample of a blend, and the number of the sample within its text."""

    def __init__(self, shares: np.ndarray, size: int) -> None:
        """Choose the texts of `size` samples by `shares` (float64 [K]).

        Pieces of the samples are computed side by side, each from a guess of what the texts have
        given before it. A piece whose guess was wrong is computed again.
        """
        self.texts = np.empty(size, _text_dtype(len(shares)))
        """Number of each sample's text."""
        pieces = -(-size // _STEPS)
        # What the texts have given before each piece, and at last before the one that there is not.
        self._given = np.zeros((pieces + 1, len(shares)), np.int64)
        for first in range(0, pieces, _LANES):
            last = min(first + _LANES, pieces)
            self._given[first + 1 : last] = _guesses(shares, np.arange(first + 1, last) * _STEPS)
            wrong = np.arange(first, last)
            while len(wrong):
                given, texts = _take(shares, self._given[wrong], wrong * _STEPS, _STEPS)
                for piece, chosen in zip(wrong.tolist(), texts.T, strict=True):
                    start = piece * _STEPS
                    self.texts[start : start + _STEPS] = chosen[: size - start]
                after = wrong + 1
                is_wrong = (self._given[after] != given).any(axis=1)
                self._given[after] = given
                wrong = after[is_wrong & (after < last)]
        rest = self.texts[(pieces - 1) * _STEPS :].astype(np.intp)
        self.totals = self._given[pieces - 1] + np.bincount(rest, minlength=len(shares))
        """Samples of each text."""

    def number_within(self, index: int) -> int:
        """Return the number of sample `index` among those of its text."""
        piece = index // _STEPS
        text = self.texts[index]
        since = int(np.count_nonzero(self.texts[piece * _STEPS : index] == text))
        return int(self._given[piece, text]) + since


def _text_dtype(texts: int) -> type[np.unsignedinteger]:
    return np.uint8 if texts <= 1 << 8 else np.uint16


def _guesses(shares: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Guess what each of K texts has given before samples `numbers` [n], as int64 [n, K].

    A guess begins some samples earlier with shares rounded down, and goes on by the rule.
    """
    earlier = numbers - _WARM_UP
    given = np.floor(shares * earlier[:, None]).astype(np.int64)
    for _ in range(len(shares)):  # what rounding down has left
        lacking = np.flatnonzero(given.sum(axis=1) < earlier)
        behind = (shares * earlier[lacking, None] - given[lacking]).argmax(axis=1)
        given[lacking, behind] += 1
    return _take(shares, given, earlier, _WARM_UP)[0]


def _take(
    shares: np.ndarray, given: np.ndarray, numbers: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the texts of `steps` samples from each of n places on.

    Args:
        shares: float64 [K].
        given: int64 [n, K], what the texts have given before each place.
        numbers: int64 [n], the samples at the places.
        steps: number of samples from each place on.

    Returns:
        What the texts have given then, [n, K], and the texts of the samples, [steps, n].
    """
    counts = np.ascontiguousarray(given.T, np.float64)
    errors, expected = np.empty_like(counts), numbers.astype(np.float64)
    kind = _text_dtype(len(shares))
    texts = np.empty((steps, len(numbers)), kind)
    names = np.arange(len(shares), dtype=kind)[:, None]
    is_larger = np.empty(len(numbers), bool)
    for chosen in texts:
        np.multiply(shares[:, None], np.maximum(expected, 1), out=errors)
        errors -= counts
        chosen.fill(0)
        largest = errors[0]
        for text in range(1, len(shares)):
            np.greater(errors[text], largest, out=is_larger)
            np.copyto(chosen, text, where=is_larger)
            np.maximum(largest, errors[text], out=largest)
        counts += names == chosen
        expected += 1
    return counts.T.astype(np.int64), texts


def _order(source: Source, sequence_length: int, samples: int | None, seed: int) -> SampleOrder:
    assert isinstance(source.text, MegatronText), "settings refuse other sources in this order"
    order = SampleOrder(
        source.name, source.text, sequence_length=sequence_length, samples=samples, seed=seed
    )
    if not len(order):
        raise UserError(
            f"source '{source.name}' has {source.text.token_count('train'):,} tokens to train on, "
            f"too few for a sequence of {sequence_length}; shorten the sequence or add text"
        )
    return order


def _shares(weights: Sequence[float]) -> list[float]:
    """Divide weights by their sum, with the rounding of Megatron-LM."""
    values = np.asarray(weights, np.float64)
    shares: list[float] = (values / values.sum()).tolist()
    return shares
