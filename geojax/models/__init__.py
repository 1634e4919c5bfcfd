"""Decoder-only transformers of Flax modules, as functions on plain parameter trees."""

from geojax.models.config import ModelConfig, RopeParameters
from geojax.models.own.decoder import Decoder
from geojax.models.own.settings import AnyModel, OwnModel
from geojax.models.parallel.limits import check_parallelism
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.partition import partitions
from geojax.models.parameters import (
    Parameters,
    init_parameters,
    parameter_count,
    parameter_kinds,
    parameter_shapes,
)
from geojax.models.transformer import Batch, logits, loss_sum

__all__ = [
    "AnyModel",
    "Batch",
    "Decoder",
    "ModelConfig",
    "OwnModel",
    "Parallelism",
    "Parameters",
    "RopeParameters",
    "check_parallelism",
    "init_parameters",
    "logits",
    "loss_sum",
    "parameter_count",
    "parameter_kinds",
    "parameter_shapes",
    "partitions",
]
