"""Training runs: the trainer, its loop and what it writes."""

from typing import TYPE_CHECKING

from geojax.lazy_names import importer

if TYPE_CHECKING:
    from geojax.train.trainer import Trainer as Trainer

_NAMES = {"geojax.train.trainer": "Trainer"}

__getattr__ = importer(__name__, _NAMES)
