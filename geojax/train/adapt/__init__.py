"""Measured steps and links of a run beside its plan, and a new plan where a link has changed."""
