"""Surfaces of the `geojax` command, each with the cases that may be drawn for it."""
