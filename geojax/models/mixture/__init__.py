"""Mixtures of experts: router, dispatch, experts, balance loss."""

from geojax.models.mixture.balance import COUNTS, weighted_balance
from geojax.models.mixture.block import mixture_block
from geojax.models.mixture.exchange import PLACES, RECEIVED
from geojax.models.mixture.experts import PRODUCT

KEPT_BY_MIXTURE = (COUNTS, PLACES, PRODUCT, RECEIVED)
"""Names of results that rematerialisation policies keep which keep matrix products."""

__all__ = ["KEPT_BY_MIXTURE", "mixture_block", "weighted_balance"]
