"""Shares of documents that Megatron-LM's `--split` holds out."""

import re
from typing import NamedTuple

import numpy as np

ALL_TRAIN = "1,0,0"
_SHARES = re.compile(r"\s*\d*\.?\d+\s*(?:,\s*\d*\.?\d+\s*){0,2}")


class SplitShares(NamedTuple):
    """Ends of the ranges of training and validation documents, as shares of all."""

    train: float
    validation: float


def parse_split(split: str) -> SplitShares:
    """Read the shares of training, validation and test documents; the last may be left out.

    Their sums and quotients are rounded as Megatron-LM rounds them.

    Raises:
        ValueError: the text is no list of up to three numbers, or they are all zero.
    """
    if len(split) > 100 or _SHARES.fullmatch(split) is None:
        raise ValueError(f"'{split[:100]}' is no list of shares; \"969,30,1\" would be right")
    numbers = [float(share) for share in split.split(",")]
    shares = np.asarray(numbers + [0.0] * (3 - len(numbers)))
    if not shares.sum() > 0:
        raise ValueError(f"'{split}' has no share above 0; \"969,30,1\" would be right")
    train, validation, _ = (shares / shares.sum()).tolist()
    return SplitShares(train, train + validation)


def document_ranges(shares: SplitShares, documents: int) -> tuple[range, range]:
    """Return the numbers of the training and of the validation documents."""
    train, validation = (round(share * float(documents)) for share in shares)
    return range(train), range(train, validation)
