"""Predicted time of a training step, term by term, without a device."""
