"""Runs of three sites of which one is killed again and again, for `benchmarks/kills.py`."""
