"""Timelines and bandwidths to look at: pictures, and traces for Perfetto."""
