"""Predicted bytes: the traffic of a training step over each mesh axis, by formula."""

from geojax.planner.traffic.by_axes import PredictedTraffic
from geojax.planner.traffic.step import predicted_step_bytes

__all__ = ["PredictedTraffic", "predicted_step_bytes"]
