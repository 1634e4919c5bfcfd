"""Faults of a run of three sites that goes on: drawn, put in, watched and judged."""
