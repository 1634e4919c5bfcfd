"""The device program of one runtime: one training step, manual over every mesh axis."""
