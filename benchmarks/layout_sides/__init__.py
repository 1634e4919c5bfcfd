"""The two sides of `benchmarks/layouts.py` and what both of them train."""
