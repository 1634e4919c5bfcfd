"""Which dtype each part of a training step works in."""

from geojax.precision.policy import Policy, policy

__all__ = ["Policy", "policy"]
