"""Which dtype each part of a training step works in."""

from geojax.precision.loss_scale import LossScale, LossScaleSettings, scale_gradient
from geojax.precision.policy import Policy, policy

__all__ = ["LossScale", "LossScaleSettings", "Policy", "policy", "scale_gradient"]
