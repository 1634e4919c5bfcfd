"""The `geojax` command: a module for each subcommand, which parses, calls and prints.

A module imports JAX when its `run` is called, but for those of `geojax plan` and `launch`.
"""
