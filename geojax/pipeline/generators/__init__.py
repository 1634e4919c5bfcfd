"""Generators: pipeline schedules from counts, costs and a memory limit."""
