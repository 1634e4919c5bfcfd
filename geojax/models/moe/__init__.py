"""Mixtures of experts: router, dispatch, experts, balance loss."""

from geojax.models.moe.aux_loss import COUNTS, weighted_aux_loss
from geojax.models.moe.block import moe_block
from geojax.models.moe.dispatch import PLACES, RECEIVED
from geojax.models.moe.experts import PRODUCT

SAVEABLE_MOE = (COUNTS, PLACES, PRODUCT, RECEIVED)
"""Names of results that rematerialisation policies keep which keep matrix products."""

__all__ = ["SAVEABLE_MOE", "moe_block", "weighted_aux_loss"]
