"""Pipelines: schedules as data, their simulation and their execution."""
