"""Mixtures of experts: router, dispatch, experts, balance loss."""

from geojax.models.moe.aux_loss import COUNTS, weighted_balance
from geojax.models.moe.block import mixture_block
from geojax.models.moe.dispatch import PLACES, RECEIVED
from geojax.models.moe.experts import PRODUCT

KEPT_BY_MIXTURE = (COUNTS, PLACES, PRODUCT, RECEIVED)
"""Names of results that rematerialisation policies keep which keep matrix products."""

__all__ = ["KEPT_BY_MIXTURE", "mixture_block", "weighted_balance"]
