"""Mixture of experts (MoE): router, dispatch, experts, load-balancing loss."""

from geojax.models.moe.aux_loss import COUNTS, weighted_aux_loss
from geojax.models.moe.block import MoE
from geojax.models.moe.dispatch import RECEIVED, SLOTS
from geojax.models.moe.experts import PRODUCT

SAVEABLE_MOE = (COUNTS, SLOTS, PRODUCT, RECEIVED)
"""Names of the results of experts that remat policies save where they save matmuls."""

__all__ = ["SAVEABLE_MOE", "MoE", "weighted_aux_loss"]
